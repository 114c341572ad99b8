"""`kvbench results`: tables and checks of finished runs."""

from kvbench.terminal.command import Commands, leave, program

cli = Commands(
    "results",
    {
        "collect": (
            "kvbench.report.command:collect",
            "one table of all runs below a folder: .csv, .parquet, .md, .tex",
        ),
        "check": ("kvbench.tools.check_results:check", "check that the numbers of runs agree with their samples"),
        "log": ("kvbench.report.log:log", "log finished runs to a tracker (logger=wandb, tensorboard, mlflow)"),
    },
    "Tables, checks and later logging of finished runs.",
)
main = program(cli)

if __name__ == "__main__":
    leave(main())
