//! The `mercury` command. Everything it does is in the library half, where it is tested.

use clap::Parser;
use mercury_cli::{args::Cli, commands};
use std::process::ExitCode;

fn main() -> ExitCode {
    commands::run(&Cli::parse()).into()
}
