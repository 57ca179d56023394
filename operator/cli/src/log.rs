//! `mercury log`.

use clap::Args;
use mercury_control::{
    access::observe,
    driver::Driver,
    error::Result,
    exit::Exit,
    interrupt::Deferred,
    log::{Events, Reader},
    output::Format,
    say::{Say, print},
    sysroot::Sysroot,
    tsc,
};
use std::time::Duration;

/// The interval at which `log --follow` reads the rings, which hold 64 records each.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Go on and show new entries until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
}

/// Shows the hypervisor's log, and new entries as they come if that is wanted.
///
/// # Errors
///
/// Returns an error if the driver is not loaded or does not answer.
pub fn run(args: &LogArgs, say: Say<'_>) -> Result<Exit> {
    let device = observe()?;
    let mut reader = Reader::new(&Sysroot::default());
    let read = |reader: &mut Reader| -> Result<Events> {
        let clock = tsc::clock(device.system()?.tsc_khz);
        Ok(reader.read(&device.shared()?, &clock))
    };
    if !args.follow {
        return read(&mut reader).map(|events| say.done(&events));
    }
    let deferred = Deferred::begin();
    while !deferred.requested() {
        let events = read(&mut reader)?;
        if !follow(&events, say) {
            break;
        }
        deferred.sleep(FOLLOW_INTERVAL);
    }
    Ok(Exit::Done)
}

/// Shows new events, each on a line of its own.
fn follow(events: &Events, say: Say<'_>) -> bool {
    match say.format {
        Format::Text => say.one_of_many(events),
        Format::Json => {
            let lines = events.events.iter().filter_map(|event| serde_json::to_string(event).ok());
            print(&lines.map(|line| line + "\n").collect::<String>())
        }
    }
}
