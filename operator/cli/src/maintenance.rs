//! `mercury maintenance`: moves this machine to another one, waits until its own hardware has been
//! repaired, and moves it back.
//!
//! This process moves with the machine. The same process leaves, waits on the other machine until
//! an operator names the destination of the way back, and arrives in the end.

use crate::relocate::migrate::MigrateArgs;
use clap::Args;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text},
    say::Say,
};
use mercury_migration::session::PairingToken;
use mercury_quiesce::this_process;
use mercury_relocation::{
    migrate::{self, report::Report},
    options::MigrateOptions,
};
use serde::Serialize;
use std::{
    io::BufRead,
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

#[derive(Debug, Args)]
pub struct MaintenanceArgs {
    /// Options of the move, the same in both directions.
    #[command(flatten)]
    pub migrate: MigrateArgs,
}

/// The interval at which the wait checks for a signal.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The step of the two moves that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Step<'a> {
    /// The machine moves away.
    Leaving {
        /// Address of the destination.
        to: &'a str,
    },
    /// The machine has arrived, and waits for words on standard input.
    Away,
    /// The machine moves back.
    Returning {
        /// Address of the machine that was repaired.
        to: &'a str,
    },
}

impl Render for Step<'_> {
    fn render(&self, to: &mut Text) {
        match self {
            Self::Leaving { to: host } => to.line(format!("1/3  moving to {host}")),
            Self::Away => {
                to.line("2/3  this machine has moved. Its source is powered off, and can be repaired.");
                to.line(
                    "     Then start the source, run `mercury receive` there, and type here what that \
                    prints:",
                );
                to.line("     HOST --key TOKEN");
            }
            Self::Returning { to: host } => to.line(format!("3/3  moving back to {host}")),
        };
    }
}

/// The results of both moves.
#[derive(Debug, Serialize)]
struct Maintained {
    /// The move away, and the move back.
    moves: [Report; 2],
}

impl Render for Maintained {
    fn render(&self, to: &mut Text) {
        to.line("this machine is back");
        for (way, report) in ["there", "back"].iter().zip(&self.moves) {
            to.line(format!("{way}: {} rounds while everything ran", report.rounds));
        }
    }
}

/// Moves there, waits, and moves back.
///
/// # Errors
///
/// Returns an error if a move has failed: the machine goes on where it was. Returns an error if the
/// operator names no destination for the way back.
pub fn run(args: &MaintenanceArgs, say: Say<'_>) -> Result<Exit> {
    let args = &MigrateOptions::from(&args.migrate);
    if args.dry_run {
        return migrate::run(args, say);
    }
    let deferred = Deferred::begin();
    access::need_root("maintenance")?;
    this_process::stay_in_the_foreground();
    if args.key.as_deref() == Some("-") {
        return Err(Error::new(Exit::Usage, "standard input is needed for the way back")
            .hint("give the pairing token with --key TOKEN, or in MERCURY_KEY"));
    }
    say.one_of_many(&Step::Leaving { to: &args.host });
    let there = migrate::move_away(args, say, &deferred)?;
    say.one_of_many(&Step::Away);
    let back = loop {
        let Words { host, key } = wait_for_words(&deferred)?;
        let way = MigrateOptions { host, key: Some(key), spare: None, ..args.clone() };
        say.one_of_many(&Step::Returning { to: &way.host });
        match migrate::move_away(&way, say, &deferred) {
            Ok(report) => break report,
            Err(error) if deferred.requested() => return Err(error),
            Err(error) => {
                eprintln!("mercury maintenance: the machine has not moved back: {error}");
                if let Some(hint) = error.hint {
                    eprintln!("  → {hint}");
                }
                say.one_of_many(&Step::Away);
            }
        }
    };
    Ok(say.done(&Maintained { moves: [there, back] }))
}

/// The destination of the way back.
#[derive(Debug, PartialEq)]
struct Words {
    host: String,
    key: String,
}

/// Reads lines until one names the destination.
fn wait_for_words(deferred: &Deferred) -> Result<Words> {
    let stays = |why: &str| {
        Error::new(Exit::Interrupted, format!("{why}: the machine stays where it is"))
            .hint("`mercury migrate HOST --key TOKEN` brings it back")
    };
    let (said, words) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            match parse(&line) {
                Ok(words) => return said.send(words),
                Err(_) if line.trim().is_empty() => {}
                Err(why) => eprintln!("mercury maintenance: {why}"),
            }
        }
        Ok(())
    });
    loop {
        match words.recv_timeout(POLL_INTERVAL) {
            Ok(words) => return Ok(words),
            Err(RecvTimeoutError::Disconnected) => return Err(stays("end of input")),
            Err(RecvTimeoutError::Timeout) if deferred.requested() => return Err(stays("interrupted")),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Parses the output of `mercury receive`, with the command's name or without.
fn parse(line: &str) -> std::result::Result<Words, String> {
    let mut words = line.split_whitespace().skip_while(|word| ["sudo", "mercury", "migrate"].contains(word));
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some(host), Some("--key"), Some(key), None) if !host.starts_with('-') => {
            key.parse::<PairingToken>().map_err(|error| error.to_string())?;
            Ok(Words { host: host.to_owned(), key: key.to_owned() })
        }
        _ => Err("type HOST --key TOKEN, as `mercury receive` has printed it".to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mercury_migration::session::Receiver;

    #[test]
    fn words_are_as_the_receiver_prints_them() {
        let (_, line) = Receiver::new(Duration::from_secs(60)).unwrap();
        let key = line.to_string();
        for line in ["", "mercury migrate ", "  sudo mercury migrate "] {
            let words = Words { host: "10.9.0.3:4747".into(), key: key.clone() };
            assert_eq!(parse(&format!("{line}10.9.0.3:4747 --key {key}")), Ok(words));
        }
        let damaged = format!("{}x", &key[..key.len() - 1]);
        for line in [
            String::new(),
            key.clone(),
            format!("--key {key}"),
            format!("10.9.0.3 --key {damaged}"),
            format!("10.9.0.3 --key {key} --force"),
        ] {
            assert!(parse(&line).is_err(), "{line}");
        }
    }
}
