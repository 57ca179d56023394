//! `mercury receive --beside`: waits for a machine that moves here, and lets it go on as a guest.

use crate::{
    Ended,
    beside::{Allowance, Arrived, Beside, Means},
    finish, say_that_it_goes_on,
    signals::Signals,
    start_keeper,
};
use clap::Args;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::Format,
    say::Say,
    size::mebibytes,
    span::Span,
};
use mercury_devices::signals::spawn;
use mercury_guest::run::{self, Confinement};
use mercury_guests::{Console, LifeArgs};
use mercury_relocation::{receive::beside::Door, values::Listen};
use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
};

/// Options of the command. `mercury receive` has checked them.
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// Address to wait at, with or without a port (4747) [default: all addresses]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<Listen>,
    /// Lifetime of the pairing token
    #[arg(long, value_name = "TIME", default_value = "24h")]
    lifetime: Span,
    /// Keep a complete arrival for ever if its source falls silent, not only for ten minutes
    #[arg(long)]
    hold_for_ever: bool,
    /// Refuse a machine with more memory
    #[arg(long, value_name = "SIZE", value_parser = mebibytes(1..=1 << 30))]
    memory_limit: Option<u64>,
    /// Folder for the contents of the machine's disks
    #[arg(long, value_name = "FOLDER")]
    disk_folder: Option<PathBuf>,
    #[command(flatten)]
    life: LifeArgs,
}

/// A message from the thread that receives.
enum News {
    Arrived(Box<Arrived>),
    /// Nothing can be received any more.
    Failed(Error),
}

/// Waits for a machine, and then for its end.
///
/// # Errors
/// Nothing can be received here. A machine that did not fit was told so, and this command waits on.
pub fn run(args: &ReceiveArgs, format: Format) -> Result<Ended> {
    // Both before any thread. Each thread has the signals blocked then.
    // A machine that has moved here does not end with the terminal of the command.
    let signals = Signals::block(&[libc::SIGTERM])?;
    let keeper = start_keeper()?;
    run::need_kvm()?;
    let door = Door::open(args.listen, args.lifetime.0)?;
    Say { format, name: "receive" }.one_of_many(door.report());
    if format == Format::Text {
        eprintln!(
            "this system stays in use; the machine goes on as its guest. Ctrl-C ends the wait, and \
             `mercury guests stop` the guest"
        );
        if args.life.net.is_none() {
            eprintln!("without --net the machine will have no network, and its connections end");
        }
    }
    let stopping = signals.watch()?;
    let (to, news) = mpsc::channel();
    let receiver = begin(args, door, Means { stopping, keeper }, to)?;
    let first = news.recv().map_err(|_| Error::fault("the thread that receives has ended"))?;
    // The folder goes with this process.
    let Arrived { running, folder: _folder, name } = match first {
        News::Arrived(arrived) => *arrived,
        News::Failed(error) => return Err(error),
    };
    say_that_it_goes_on(&name, Console::Socket, format);
    let ended = finish(running, name);
    // The thread tells a source that still asks, if the machine has ended too early.
    let _ = receiver.join();
    Ok(ended)
}

/// Starts the thread that receives. When no source can ask any more, this process gives up its rights.
fn begin(args: &ReceiveArgs, door: Door, means: Means, to: Sender<News>) -> Result<JoinHandle<()>> {
    let arrived = to.clone();
    let confinement = Arc::new(Mutex::new(None));
    let kept = Arc::clone(&confinement);
    let take = move |one: Arrived| {
        *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(one.running.confinement());
        arrived.send(News::Arrived(Box::new(one))).is_ok()
    };
    let allowance = Allowance { memory_limit: args.memory_limit, disk_folder: args.disk_folder.clone() };
    let beside = Beside::new(args.life.clone(), allowance, means, take);
    if !beside.can_announce() {
        eprintln!(
            "without CAP_NET_RAW this host hears and tells the source by its connection only: if that is \
             cut in the hand-over, the operators decide"
        );
    }
    let hold_for_ever = args.hold_for_ever;
    let serve = move || {
        let served = door.serve(Box::new(beside), hold_for_ever);
        let confinement = confinement.lock().unwrap_or_else(PoisonError::into_inner);
        match confinement.as_ref().map(Confinement::begin) {
            None => {
                if let Err(error) = served {
                    let _ = to.send(News::Failed(error));
                }
            }
            Some(confined) => warnings(served, confined).iter().for_each(|text| note!("mercury: {text}")),
        }
    };
    // It starts the guest's processors, which take signals: so this thread does.
    spawn("receiver", serve).map_err(|error| {
        Error::new(Exit::Failed, format!("cannot start a thread: {error}")).hint(mercury_guest::SHORT_OF)
    })
}

/// Returns the warnings for a machine that runs, whatever has failed: no source asks any more, and the
/// machine's end is the only other news.
fn warnings(served: Result<()>, confined: Result<()>) -> Vec<String> {
    let served = served.err().map(|error| format!("the connection to the source has failed: {error}"));
    let confined = confined
        .err()
        .map(|error| format!("the guest runs on, but its monitor keeps all rights of this command: {error}"));
    served.into_iter().chain(confined).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_after_a_machine_was_taken_is_told() {
        let error = |text| Err(Error::new(Exit::Failed, text));
        assert!(warnings(Ok(()), Ok(())).is_empty());
        let both = warnings(error("no line"), error("no filter"));
        assert!(both[0].contains("no line") && both[1].contains("keeps all rights"), "{both:?}");
        assert!(warnings(Ok(()), error("no filter"))[0].contains("no filter"));
    }
}
