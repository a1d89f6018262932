//! Shell completions and manual pages for the command line.

use clap::CommandFactory;
use clap::error::ErrorKind;

use crate::args::{Cli, CompletionsArgs, ManualArgs};
use crate::console;
use crate::error::Failure;

/// Prints the completions for a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    console::answer(String::from_utf8_lossy(&script).trim_end())
}

/// Prints a manual page. An unknown command ends the process like any other wrong argument.
pub(crate) fn manual(args: &ManualArgs) -> Result<(), Failure> {
    let mut all = Cli::command();
    all.build();
    let page = match &args.command {
        None => all.clone(),
        Some(name) => match all.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let message = format!("there is no command `{name}`; see `burn-fsdp --help`");
                all.error(ErrorKind::InvalidSubcommand, message).exit()
            }
        },
    };
    let mut roff = Vec::new();
    // Writing to a vector cannot fail.
    let _ = clap_mangen::Man::new(page).render(&mut roff);
    console::answer(String::from_utf8_lossy(&roff).trim_end())
}
