//! The `mercury` command. Its code is in the library half, where it is tested.

use mercury_cli::{commands, help};
use mercury_relocation::restore::init;
use std::process::ExitCode;

fn main() -> ExitCode {
    if init::is_init() {
        return init::run();
    }
    commands::run(&help::parse()).into()
}
