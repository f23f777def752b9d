"""From two models to an answer on a translated cache: `python examples/quickstart.py [--tokens N]`."""

import argparse

from hf_mot.fit import fit
from hf_mot.hub.packaged import packaged_corpus
from hf_mot.hub.resolve import load_model, load_tokenizer

PASSAGE = (
    "The lighthouse on Gannet Rock was built by Ellen Marsh in 1874. It is painted green, and its keeper was a "
    "retired sailor called Tobias."
)
QUESTION = "Who built the lighthouse?"
PROMPT = f"\nQuestion: {QUESTION}\nAnswer:"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="target tokens to fit on; more is better [20000]")
    args = parser.parse_args()

    # Two real models that pip can fetch. The source reads; the target only ever sees the question.
    source_name, target_name = "demo/smollm2-135m-instruct", "demo/gemma-3-270m"
    pair = {
        "source": load_model(source_name),
        "target": load_model(target_name),
        "source_tokenizer": load_tokenizer(source_name),
        "target_tokenizer": load_tokenizer(target_name),
    }
    target, tokenizer = pair["target"], pair["target_tokenizer"]

    translator = fit(packaged_corpus(), **pair, max_tokens=args.tokens).translator
    translated = translator.handoff(PASSAGE, **pair)

    def answer(prompt: str, **inputs) -> str:
        prompt = tokenizer(prompt, return_tensors="pt")
        output = target.generate(**prompt, **inputs, max_new_tokens=16, do_sample=False)
        text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return text.strip().partition("\n")[0]

    rows = {
        "passage": PASSAGE,
        "question": QUESTION,
        "on the source's cache": answer(PROMPT, past_key_values=translated),
        "reading it natively": answer(PASSAGE + PROMPT),
        "without the passage": answer(PROMPT),
    }
    for label, text in rows.items():
        print(f"{label + ':':<24}{text}")


if __name__ == "__main__":
    main()
