//! The `mercury` command. Everything it does is in the library half, where it is tested.

use clap::Parser;
use mercury_cli::{args::Cli, commands, restore::init};
use std::process::ExitCode;

fn main() -> ExitCode {
    if init::is_init() {
        return init::run();
    }
    commands::run(&Cli::parse()).into()
}
