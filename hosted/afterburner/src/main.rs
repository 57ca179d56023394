//! The command `afterburner` and the stand-in for the assembler: one program, whose name in the
//! call decides.

use std::{env, process::ExitCode};

use clap::Parser;
use mercury_afterburner::{
    args::{Cli, Command, Generated},
    assembler,
    error::{Error, Result},
    generate, make, verify,
};

fn main() -> ExitCode {
    let mut words = env::args_os();
    let done = if assembler::is_called(words.next().as_deref()) {
        assembler::run(&words.collect::<Vec<_>>())
    } else {
        run(Cli::parse().command)
    };
    done.unwrap_or_else(|error| assembler::complain(&error))
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Make { arguments } => make::run(&arguments),
        Command::Verify { files, json } => verify::report::run(&files, json),
        Command::List { file, json } => verify::report::list(&file, json),
        Command::Generate { what, directory } => {
            let written = match what {
                Generated::Man => generate::man(&directory),
                Generated::Completions => generate::completions(&directory),
            };
            written.map(|()| ExitCode::SUCCESS).map_err(|error| Error::file("write to", &directory, error))
        }
    }
}
