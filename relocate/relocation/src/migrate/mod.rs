//! `mercury migrate`: moves this machine to another one, which waits in `mercury receive`.
//!
//! 1. The two ends authenticate each other ([`link`]). The hypervisor is slipped beneath this
//!    machine, and a snapshot is prepared. The source describes itself ([`offer`]); the destination
//!    refuses it with every reason, or accepts it.
//! 2. Memory is sent while everything runs, round by round: each round sends the pages that have
//!    changed since they were sent ([`copy`]).
//! 3. Applications are held still, file systems are frozen, and the network is fenced off except
//!    for this connection. Then the instant comes, as for a checkpoint, and the remaining changed
//!    pages are sent.
//! 4. The hand-over: [`mercury_migration::protocol`] decides the actions, and [`mover`] carries
//!    them out. If anything fails before the commit, this machine goes on as if nothing had been
//!    tried.
//! 5. The machine that has arrived announces itself ([`arrival`]), and the source is powered off.

pub mod arrival;
pub mod by_host;
pub mod copy;
mod course;
pub mod disk;
pub mod doubt;
mod dry_run;
mod here;
#[cfg(test)]
mod hostile;
pub mod link;
mod log;
pub mod mirror;
mod mover;
mod no_way_back;
pub mod offer;
pub mod page_stream;
pub mod pause;
pub mod report;
mod system;
#[cfg(test)]
pub(crate) mod trial;
#[cfg(test)]
mod turns;

use crate::{
    host,
    operator::Operator,
    options::MigrateOptions,
    refusals::{self, Lifted, Operation},
    tombstone::{StartedBy, Tombstones},
};
use by_host::HostLine;
use here::{Here, With};
use link::Link;
use mercury_abi::code::Code;
use mercury_control::{
    access,
    device::{Access, Device},
    error::{Error, Result},
    exit::Exit,
    history::{self, Action, Attempt},
    interrupt::Deferred,
    output::Format,
    say::Say,
    sysroot::Sysroot,
};
use mercury_migration::{
    protocol::Patience,
    session::{MachineKey, MachineName, PairingToken},
};
use mercury_quiesce::{attached::Attached, this_process, undo::UndoProcess};
use mover::{Mover, Outcome, Remains};
use std::{
    io::{Read, Write},
    net::SocketAddr,
    time::Duration,
};

/// Time for which the other end may be silent in the middle of a frame, while everything runs.
const RUNNING: Duration = Duration::from_secs(30);
/// The same time while everything stands still.
const FROZEN: Duration = Duration::from_secs(20);

/// Runs `mercury migrate`.
///
/// # Errors
///
/// Returns the reason if this machine has not moved; the machine goes on.
pub fn run(args: &MigrateOptions, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    access::need_root("migrate")?;
    if args.dry_run {
        if args.key.is_some() {
            pairing_token(args.key.as_deref())?;
        }
        return dry_run::run(args, say, &Sysroot::default(), &deferred);
    }
    this_process::stay_in_the_foreground();
    move_away(args, say, &deferred).map(|report| say.done(&report))
}

/// Moves this machine. Returns at the destination; the source is powered off.
///
/// # Errors
///
/// Returns the reason if this machine has not moved; the machine goes on.
pub fn move_away(args: &MigrateOptions, say: Say<'_>, deferred: &Deferred) -> Result<report::Report> {
    let host = HostLine::open(args.ordered.as_deref())?;
    let attempt = Attempt::begin(Action::Migrate);
    let moved = leave(args, say, deferred, &host);
    if let Err(error) = &moved {
        host.error(error);
    }
    attempt.end(moved.as_ref().map(|_| (history::Outcome::Continued, None)));
    moved
}

fn leave(
    args: &MigrateOptions,
    say: Say<'_>,
    deferred: &Deferred,
    host: &HostLine,
) -> Result<report::Report> {
    let sysroot = Sysroot::default();
    course::refuse_hopeless(args)?;
    let way = Way::of(args)?;
    refuse_unmovable(args, &sysroot)?;
    let to = host::resolve(&args.host)?;
    refuse_busy()?;
    let token = way.token(to)?;
    let link = Link::connect(to, &token, RUNNING)?;
    if let Some(name) = &args.congestion_control {
        link.control_congestion(name)?;
    }
    let device = access::loaded_for_move(args.module.as_deref(), "migrate")?;
    // The open device keeps other processes from moving this machine now, and the undo process
    // finds what is opened here.
    let tombstones = if args.without_tombstone {
        None
    } else {
        Tombstones::choose_against(StartedBy::of_this_machine(), &args.host, &sysroot)?
    };
    let mut guard = UndoProcess::start()?;
    let attached = Attached::for_move(&device, &mut guard)?;
    let with = With { args, say, sysroot: &sysroot, deferred, device: &device, guard: &mut guard, host };
    let (mut here, departure) = Here::make_ready(with, tombstones, (to, token, link))?;
    let patience = Patience { running: RUNNING, frozen: FROZEN, doubt: doubt::PATIENCE, hold: None };
    let mut mover = Mover::new(args, &mut here, patience, departure)?;
    let outcome = mover.run();
    let report = mover.report();
    let Remains { failure, mut operator, mut pause } = mover.into_remains();
    let (held, may_write, mut readiness) = here.into_remains();
    match outcome {
        Outcome::Arrived(mut arrived) => {
            // The destination has no hypervisor beneath this machine.
            attached.forget();
            arrived.settle(held, &mut guard, &mut readiness, &mut |step| {
                if let Some(text) = pause.reached(step) {
                    operator.tell(&text);
                    pause::hold(|| ());
                }
            });
            Ok(report)
        }
        Outcome::GivenUp => {
            attached.forget();
            // From here on nothing on this machine may go on.
            std::mem::forget(held);
            readiness.stay();
            host.report(&report);
            power_off(say, &report, operator, may_write)
        }
        Outcome::Resumed => {
            drop(held);
            attached.undo()?;
            guard.is_undone();
            let failure =
                failure.unwrap_or_else(|| Error::fault("the machine has not moved, and gives no reason"));
            // In text format the error tells it.
            if say.format == Format::Json {
                say.one_of_many(&report::MoveEvent::Resumed { why: failure.message.clone() });
            }
            Err(failure)
        }
    }
}

/// Reports a machine that runs at the destination, and powers this one off.
fn power_off(say: Say<'_>, report: &report::Report, mut operator: Operator, may_write: bool) -> ! {
    if may_write {
        print_if_possible(mercury_control::output::text(say.format, say.name, report));
    }
    let after = report.after.clone().unwrap_or_default();
    operator.tell(&format!(
        "this machine has moved: {} rounds; changed pages were found by {}, which read {} pages at the \
         end; applications stood still for {:.0} ms ({:.0} until the instant, {:.0} for the last pages, \
         {:.0} until they were verified, {:.0} for the start); {} bytes were sent, in {:.1} s. This \
         machine is powered off",
        report.rounds,
        after.found_by,
        after.scanned,
        after.downtime_us / 1e3,
        after.quiesce_us / 1e3,
        after.last_us / 1e3,
        after.verify_us / 1e3,
        after.start_us / 1e3,
        report.bytes.iter().sum::<u64>(),
        after.seconds
    ));
    switch_off(&mut operator)
}

/// Switches this machine off, because the machine runs at the destination.
fn switch_off(operator: &mut Operator) -> ! {
    // No dirty data is written to the disks, because they are the destination's now.
    // SAFETY: touches no memory of this process.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    operator.tell("this machine could not be powered off: switch it off. Nothing may run here any more");
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Prints in a thread with a time limit: the reader may stand still, and a file may be on the other
/// side of the fence.
fn print_if_possible(text: String) {
    let writer = std::thread::Builder::new().spawn(move || {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
    });
    // If no thread starts, the text is lost; the console is told as well.
    let Ok(said) = writer else { return };
    let end = std::time::Instant::now() + Duration::from_millis(500);
    while !said.is_finished() && std::time::Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Refuses a machine that moves already, or is being written to an image, before the other end is
/// asked.
fn refuse_busy() -> Result<()> {
    match Device::open(Access::Control) {
        Err(error) if error.code == Some(Code::Busy) => Err(error),
        // A missing driver is loaded later.
        _ => Ok(()),
    }
}

/// Refuses the same machines as `mercury doctor` predicts, before anything is tried.
fn refuse_unmovable(args: &MigrateOptions, sysroot: &Sysroot) -> Result<()> {
    let lifted = refusals::lifted(&[
        (args.force_devices, Lifted::Devices),
        (args.without_tombstone, Lifted::Tombstone),
    ]);
    refusals::refuse(Operation::Migrate, &lifted, sysroot)
}

/// The way to the pairing token.
enum Way {
    Told(PairingToken),
    /// The destination tells it to this machine, by their long-lived keys.
    Known(MachineKey, MachineName),
}

impl Way {
    fn of(args: &MigrateOptions) -> Result<Self> {
        match &args.spare {
            Some(name) => Ok(Self::Known(crate::identity::read(&args.identity)?, *name)),
            None => pairing_token(args.key.as_deref()).map(Self::Told),
        }
    }

    fn token(self, to: SocketAddr) -> Result<PairingToken> {
        match self {
            Self::Told(token) => Ok(token),
            Self::Known(key, name) => link::introduce(to, &key, &name, RUNNING),
        }
    }
}

/// Reads the pairing token that was given: the text, or - for standard input.
///
/// # Errors
///
/// Returns an error if it is none.
pub fn pairing_token(given: Option<&str>) -> Result<PairingToken> {
    let text = match given {
        Some("-") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map_err(|error| {
                Error::new(
                    Exit::Failed,
                    format!("the pairing token cannot be read from standard input: {error}"),
                )
                .hint("pipe the output of `mercury receive` into this command")
            })?;
            text
        }
        Some(text) => text.to_owned(),
        None => {
            return Err(Error::new(
                Exit::Usage,
                "the pairing token that `mercury receive` has printed is missing",
            )
            .hint("give --key TOKEN, --key - for standard input, or MERCURY_KEY"));
        }
    };
    // The text may have the words that `mercury receive` prints before the token.
    let word = text.split_whitespace().last().unwrap_or_default();
    word.parse().map_err(|error: mercury_migration::session::Error| {
        Error::new(Exit::Usage, error.to_string())
            .hint("paste the whole pairing token that `mercury receive` has printed")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::session::Receiver;

    fn key_of(text: &str) -> Result<PairingToken> {
        pairing_token(Some(text))
    }

    #[test]
    fn the_line_is_taken_with_the_words_that_it_was_printed_with() {
        let (_, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        let token = token.to_string();
        let printed =
            format!("on the machine that is to move here:\n  mercury migrate 10.9.0.3 --key {token}\n");
        for text in [&token, &printed] {
            assert_eq!(key_of(text).expect("a token").to_string(), token);
        }
        for text in ["", "\n", "words", &printed[..printed.len() - 2]] {
            assert!(key_of(text).is_err_and(|error| error.exit == Exit::Usage), "{text}");
        }
    }
}
