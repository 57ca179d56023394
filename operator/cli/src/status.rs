//! `mercury status` and `mercury top`.

use clap::Args;
use mercury_control::{
    access::current_status,
    error::Result,
    exit::Exit,
    interrupt::Deferred,
    output::Format,
    say::{Say, print},
    status::{Rate, Status},
};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

/// The interval at which `status --watch` reads the status.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show the status again each second until Ctrl-C
    #[arg(short, long)]
    pub watch: bool,
}

/// Shows the status once, or again and again.
///
/// # Errors
///
/// Returns an error if the driver is not loaded or does not answer.
pub fn run(args: &StatusArgs, say: Say<'_>) -> Result<Exit> {
    if args.watch { watch(say) } else { current_status().map(|status| say.done(&status)) }
}

/// Shows the status each second until Ctrl-C.
///
/// # Errors
///
/// Returns an error if the driver is not loaded or does not answer.
pub fn watch(say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let mut before: Option<(Instant, Status)> = None;
    while !deferred.requested() {
        let (now, status) = (Instant::now(), current_status()?);
        if say.format == Format::Text && std::io::stdout().is_terminal() {
            print("\x1b[H\x1b[J");
        }
        if !say.one_of_many(&status) {
            break;
        }
        if let (Some((then, old)), Format::Text) = (&before, say.format) {
            let rate = Rate::between(old, &status, now.duration_since(*then).as_secs_f64());
            print(&format!("\n{rate}. Ctrl-C ends.\n"));
        }
        before = Some((now, status));
        deferred.sleep(WATCH_INTERVAL);
    }
    Ok(Exit::Done)
}
