"""Where models and translators come from: the Hub, a directory, a GGUF file, or the packaged pair of the demo."""
