//! Programs that may never end, because their files lie on a device that does not answer.

use super::no_answer_of;
use std::{
    io,
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

/// Time for a small program of the system, such as modprobe or a decompressor, to end.
pub const PROGRAM_PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program without input and returns what it wrote. A program that has not ended in time is left
/// behind: the start itself may wait for a device, and then there is no process to end.
///
/// # Errors
///
/// Returns an error if the program cannot be started, and one of the kind [`io::ErrorKind::TimedOut`] that
/// names the program if it has not ended in time.
pub fn output(mut command: Command, patience: Duration) -> io::Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let (sender, receiver) = mpsc::channel();
    let start = move || drop(sender.send(command.stdin(Stdio::null()).output()));
    thread::Builder::new().name(name.clone()).spawn(start)?;
    receiver.recv_timeout(patience).unwrap_or_else(|_| Err(no_answer_of(&name, patience)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn the_output_and_the_status_arrive() {
        let ended = output(shell("echo said; exit 3"), PROGRAM_PATIENCE).expect("it ends");
        assert_eq!((ended.stdout.as_slice(), ended.status.code()), (&b"said\n"[..], Some(3)));
    }

    #[test]
    fn a_missing_program_is_told_from_a_silent_one() {
        let missing = output(Command::new("/no/such/program"), PROGRAM_PATIENCE);
        assert_eq!(missing.map_err(|error| error.kind()).err(), Some(io::ErrorKind::NotFound));
        let silent = output(shell("exec sleep 30"), Duration::from_millis(200)).expect_err("too slow");
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        assert_eq!(silent.to_string(), "sh has not answered for 0 s");
    }
}
