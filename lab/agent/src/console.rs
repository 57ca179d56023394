//! The shell on the serial console, with a session and a controlling terminal of its own.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
};

use mercury_lab_agent::LAB_DIR;
use rustix::termios::{Winsize, tcsetwinsize};

use crate::{Result, cmdline::Cmdline};

/// Turns this process into the shell.
pub fn run() -> Result<()> {
    let cmdline = Cmdline::read();
    rustix::process::setsid()?;
    let console = File::options().read(true).write(true).open(console_device())?;
    rustix::process::ioctl_tiocsctty(&console)?;
    set_size(&console, &cmdline);
    rustix::stdio::dup2_stdin(&console)?;
    rustix::stdio::dup2_stdout(&console)?;
    rustix::stdio::dup2_stderr(&console)?;
    let mut shell = Command::new("/bin/bash");
    shell.args(["--rcfile", &format!("{LAB_DIR}/lib/bashrc"), "-i"]);
    shell
        .current_dir("/root")
        .env("TERM", known_terminal(cmdline.get("term").unwrap_or("linux"), is_described));
    Err(shell.exec().into())
}

/// Returns the terminal's own name if `is_described`, else the name of its closest relative that
/// is: `tmux-direct` is a `tmux`.
fn known_terminal(name: &str, is_described: impl Fn(&str) -> bool) -> &str {
    let ends = name.match_indices(['-', '.', '+']).map(|(at, _)| at);
    let mut shorter = std::iter::once(name.len()).chain(ends.collect::<Vec<_>>().into_iter().rev());
    shorter.find(|&end| is_described(&name[..end])).map_or("xterm", |end| &name[..end])
}

/// Returns true if the machine's terminfo describes the terminal (terminfo(5), "Fetching Compiled
/// Descriptions").
fn is_described(name: &str) -> bool {
    const PLACES: [&str; 3] = ["/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo"];
    let Some(first) = name.get(..1) else { return false };
    PLACES.iter().any(|place| Path::new(place).join(first).join(name).is_file())
}

/// Returns the device of `/dev/console`, which is the last console of the command line.
fn console_device() -> String {
    let active = fs::read_to_string("/sys/class/tty/console/active").unwrap_or_default();
    format!("/dev/{}", active.split_whitespace().last().unwrap_or("ttyS0"))
}

fn set_size(console: &File, cmdline: &Cmdline) {
    let number = |key| cmdline.get(key).and_then(|value| value.parse().ok());
    let (Some(ws_row), Some(ws_col)) = (number("rows"), number("columns")) else { return };
    let _ = tcsetwinsize(console, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_without_a_description_become_their_kin() {
        let known = |name: &str| ["xterm-256color", "xterm", "tmux", "screen"].contains(&name);
        assert_eq!(known_terminal("xterm-256color", known), "xterm-256color");
        assert_eq!(known_terminal("tmux-direct", known), "tmux");
        assert_eq!(known_terminal("screen.xterm-ghostty", known), "screen");
        assert_eq!(known_terminal("xterm-256color-italic", known), "xterm-256color");
        assert_eq!(known_terminal("vendor", known), "xterm");
        assert_eq!(known_terminal("", known), "xterm");
    }
}
