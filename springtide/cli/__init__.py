"""The command line `springtide`: for operators, and `springtide up` for one machine."""


def main() -> None:
    """Entry point. The commands are imported when they are called: start-up stays quick."""
    from springtide.cli.root import springtide

    springtide(prog_name="springtide")
