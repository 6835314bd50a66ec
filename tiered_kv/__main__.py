"""`python -m tiered_kv`: the command line, also where no script was installed."""

from tiered_kv.cli import main

if __name__ == "__main__":
    main()
