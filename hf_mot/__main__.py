"""`python -m hf_mot`: the same as `hf-mot`."""

import sys

from hf_mot.cli.main import main

sys.exit(main())
