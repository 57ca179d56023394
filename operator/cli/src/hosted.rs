//! `mercury hosted` and `mercury disco`: execute `mercury-hosted`, the program that carries the runtime.
//!
//! The runtime is a program of its own so that `mercury` stays small: a restore environment holds a copy of
//! `mercury`, and never runs a hosted machine. The words of the command line have been checked when this
//! module passes them on.

use std::{
    ffi::{OsStr, OsString},
    io::ErrorKind,
    os::unix::process::CommandExt,
    process::Command,
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};

/// The program, beside this one or in the search path.
const PROGRAM: &str = "mercury-hosted";

/// Replaces this process by `mercury-hosted`, with the same words. Returns only if the program cannot be
/// started.
pub fn run() -> Result<Exit> {
    become_program(PROGRAM, without_command(std::env::args_os().skip(1)))
}

/// Replaces this process by `mercury-hosted` for a command of `mercury disco`. Returns only if the program
/// cannot be started.
pub fn disco() -> Result<Exit> {
    become_program(PROGRAM, std::env::args_os().skip(1).collect())
}

/// Replaces this process by another program of Mercury's. Returns only if the program cannot be started.
///
/// # Errors
/// If the program cannot be started.
pub(crate) fn become_program(name: &str, words: Vec<OsString>) -> Result<Exit> {
    let beside = std::env::current_exe().ok().map(|this| this.with_file_name(name));
    let program = beside.filter(|path| path.exists()).map_or_else(|| name.into(), OsString::from);
    let error = Command::new(&program).args(words).exec();
    let refused = Error::new(Exit::Failed, format!("cannot start {}: {error}", program.display()));
    Err(match error.kind() {
        ErrorKind::NotFound => refused
            .hint(format!("this needs the program {name}: install it beside mercury or in a folder of PATH")),
        _ => refused.hint(format!("make sure that you may execute {name}, and that enough memory is free")),
    })
}

/// Returns the words of the command line without the command `hosted` itself. No option before the command
/// has a value.
fn without_command(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    if let Some(at) = words.iter().position(|word| word == OsStr::new("hosted")) {
        words.remove(at);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_left_out_once_and_all_else_is_passed_on() {
        let passed = |line: &str| without_command(line.split(' ').map(OsString::from)).join(OsStr::new(" "));
        assert_eq!(passed("hosted run --kernel hosted"), "run --kernel hosted");
        assert_eq!(passed("--json hosted run --check --kernel x"), "--json run --check --kernel x");
    }
}
