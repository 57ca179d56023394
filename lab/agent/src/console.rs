//! The shell on the serial console, with a session and a controlling terminal of its own.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    process::Command,
};

use mercury_lab_agent::LAB_DIR;
use rustix::termios::{Winsize, tcsetwinsize};

use crate::{Result, cmdline::Cmdline};

/// Becomes the shell.
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
    shell.current_dir("/root").env("TERM", cmdline.get("term").unwrap_or("linux"));
    Err(shell.exec().into())
}

/// The last console of the command line is the one that `/dev/console` stands for.
fn console_device() -> String {
    let active = fs::read_to_string("/sys/class/tty/console/active").unwrap_or_default();
    format!("/dev/{}", active.split_whitespace().last().unwrap_or("ttyS0"))
}

fn set_size(console: &File, cmdline: &Cmdline) {
    let number = |key| cmdline.get(key).and_then(|value| value.parse().ok());
    let (Some(ws_row), Some(ws_col)) = (number("rows"), number("columns")) else { return };
    let _ = tcsetwinsize(console, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 });
}
