//! The first process of a lab machine, which carries out the host's requests.
//!
//! One program has four roles, by name and argument:
//!
//! - `init`, started by the kernel from the initramfs: finds the root disk and the artefacts, and
//!   changes to them. Then it is either the first process itself or gives way to systemd
//!   (`init.rs`).
//! - `mercury-lab-agent serve`: carries out the host's requests over the virtio-serial port
//!   (`serve.rs`).
//! - `poweroff`, `reboot`, `halt`: end the machine where systemd would not (`power.rs`).
//! - `mercury-lab-agent shell`: the shell on the serial console (`console.rs`).

#![allow(missing_docs)]

mod boot;
mod cmdline;
mod console;
mod environment;
mod init;
mod jobs;
mod power;
mod serve;

use std::{error::Error, path::Path, process::ExitCode};

/// The result of any operation. This program only ever shows errors.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let mut args = std::env::args();
    let name = args.next().unwrap_or_default();
    let name = Path::new(&name).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (role, what) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let done = match (power::End::named(name), role.as_str(), power::End::named(&what)) {
        (Some(end), _, _) => power::request(end),
        (_, "end", Some(end)) => power::end_detached(end),
        (_, "serve", _) => serve::run(),
        (_, "shell", _) => console::run(),
        _ if rustix::process::getpid().is_init() => init::run(),
        _ => Err("this is the lab's agent: it is started by the machine it lives in".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mercury-lab-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
