//! A dirty log through the driver, with its proof: a page that is not in the log has at the instant
//! the contents of its last reading, whatever wrote to memory.

use std::{collections::HashMap, fs::File, path::PathBuf, thread, time::Duration};

use mercury_abi::{
    Header,
    ioctl::{
        LogRequest, MERCURY_IOC_LOG_BEGIN, MERCURY_IOC_LOG_COLLECT, MERCURY_IOC_SNAPSHOT_BEGIN,
        MERCURY_IOC_SNAPSHOT_END, MERCURY_IOC_SNAPSHOT_PREPARE, MERCURY_IOC_SNAPSHOT_READ,
        MERCURY_IOC_SNAPSHOT_READ_PRESENT, MERCURY_READ_LOGGED, MERCURY_READ_USED, MERCURY_SNAPSHOT_TRACK,
        SnapshotRequest,
    },
};

use crate::{
    Result, device,
    frames::{self, Selection},
    report::Report,
    snapshot::kind,
    stop::Stop,
};

/// The number of missed pages that are reported one by one.
const SHOWN: u64 = 20;

/// The logs to keep.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Pages of the pool
    #[arg(long, default_value_t = 20_000)]
    pool_pages: u64,
    /// End after this many logs
    #[arg(long)]
    rounds: Option<u64>,
    /// Collections before the instant
    #[arg(long, default_value_t = 4)]
    collections: u64,
    /// After one reading of all memory, report that and wait for this file
    #[arg(long)]
    wait_file: Option<PathBuf>,
}

#[derive(Default)]
struct Totals {
    memory: u64,
    logged: u64,
    last: u64,
    last_of_devices: u64,
    changed_last: u64,
    missed: u64,
}

/// Keeps one log after the other. All CPUs are attached.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let device = device::open_to_control()?;
    let mut totals = Totals::default();
    while !stop.now() && args.rounds.is_none_or(|rounds| report.passes() < rounds) {
        round(&device, args, report, &mut totals)?;
        report.pass();
    }
    report.fact("memory_pages", totals.memory);
    report.fact("logged_pages", totals.logged);
    report.fact("last_pages", totals.last);
    report.fact("last_device_pages", totals.last_of_devices);
    report.fact("last_changed_pages", totals.changed_last);
    report.fact("missed_pages", totals.missed);
    Ok(())
}

fn round(device: &File, args: &Args, report: &mut Report, totals: &mut Totals) -> Result<()> {
    let mut known = HashMap::new();
    snapshot(device, MERCURY_IOC_SNAPSHOT_PREPARE, MERCURY_SNAPSHOT_TRACK, args.pool_pages)?;
    log(device, MERCURY_IOC_LOG_BEGIN)?;
    let mut note = |frame: u64, found: u64| known.insert(frame, found) != Some(found);
    totals.memory += read(device, MERCURY_IOC_SNAPSHOT_READ_PRESENT, 0, &mut note)?.0;
    if let Some(file) = &args.wait_file {
        println!("all of memory has been read");
        while !file.exists() {
            thread::sleep(Duration::from_millis(50));
        }
    }
    for _ in 0..args.collections {
        thread::sleep(Duration::from_millis(200));
        log(device, MERCURY_IOC_LOG_COLLECT)?;
        totals.logged += read(device, MERCURY_IOC_SNAPSHOT_READ_PRESENT, MERCURY_READ_LOGGED, &mut note)?.0;
    }
    let begun = snapshot(device, MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_SNAPSHOT_TRACK, args.pool_pages)?;
    let collected = log(device, MERCURY_IOC_LOG_COLLECT)?;
    let last = read(device, MERCURY_IOC_SNAPSHOT_READ, MERCURY_READ_LOGGED, &mut note)?;
    totals.last += last.0;
    totals.changed_last += last.1;
    totals.last_of_devices += collected.device_pages;
    // The remaining pages were not in the log.
    let mut missed = 0;
    let mut compare = |frame: u64, found: u64| {
        let is_missed = known.get(&frame) != Some(&found);
        missed += u64::from(is_missed);
        report.check(!is_missed || missed > SHOWN, || {
            format!("{frame:#x} was written, and is not in the log; it is of kind {}", kind(frame))
        });
        is_missed
    };
    let rest = read(device, MERCURY_IOC_SNAPSHOT_READ, MERCURY_READ_USED, &mut compare)?.0;
    totals.missed += missed;
    report.check(last.0 + rest <= begun.memory_pages, || {
        format!("{} and {rest} of {} pages", last.0, begun.memory_pages)
    });
    report.check(rest > last.0, || format!("only {rest} pages were not in the log"));
    let ended = snapshot(device, MERCURY_IOC_SNAPSHOT_END, 0, 0)?;
    report.check(ended.status.exact == 1, || format!("the snapshot is invalid: {:?}", ended.status));
    Ok(())
}

fn snapshot(device: &File, what: u32, flags: u64, pool_pages: u64) -> Result<SnapshotRequest> {
    let header = Header::of::<SnapshotRequest>();
    let mut request = SnapshotRequest { header, flags, pool_pages, ..SnapshotRequest::default() };
    device::request(device, what, &mut request).map_err(|error| device::explain(error, request.outcome))?;
    Ok(request)
}

fn log(device: &File, what: u32) -> Result<LogRequest> {
    let mut request = LogRequest { header: Header::of::<LogRequest>(), ..LogRequest::default() };
    device::request(device, what, &mut request).map_err(|error| device::explain(error, request.outcome))?;
    Ok(request)
}

/// Reads frames and passes on their hashes. Returns the number of frames, and the number for which
/// `each` reports a change.
fn read(
    device: &File,
    request: u32,
    flags: u64,
    each: &mut impl FnMut(u64, u64) -> bool,
) -> Result<(u64, u64)> {
    let mut changed = 0;
    let selection = Selection { request, flags, hashed: false };
    let count = frames::read(device, selection, |frame| changed += u64::from(each(frame.phys, frame.found)))?;
    Ok((count, changed))
}
