//! Snapshots of memory through the driver, with their proof: the hypervisor has hashed every page
//! at the instant, while no CPU ran the system, and each page that is read must have the same hash.
//! Needs a build with fault points.

use std::{fs::File, os::unix::fs::FileExt};

use mercury_abi::{
    Header,
    ioctl::{
        MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_IOC_SNAPSHOT_END, MERCURY_IOC_SNAPSHOT_READ,
        MERCURY_SNAPSHOT_HASH, SnapshotRequest,
    },
};

use crate::{
    Result, device,
    frames::{self, Selection},
    report::Report,
    stop::Stop,
};

/// The snapshots to take.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Pages of the pool
    #[arg(long, default_value_t = 20_000)]
    pool_pages: u64,
    /// End after this many snapshots
    #[arg(long)]
    rounds: Option<u64>,
}

/// Takes one snapshot after the other. All CPUs are attached.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let device = device::open_to_control()?;
    let mut totals = Totals::default();
    while !stop.now() && args.rounds.is_none_or(|rounds| report.passes() < rounds) {
        round(&device, args, report, &mut totals)?;
        report.pass();
    }
    report.fact("memory_pages", totals.memory);
    report.fact("copied_pages", totals.copied);
    Ok(())
}

#[derive(Default)]
struct Totals {
    memory: u64,
    copied: u64,
}

fn round(device: &File, args: &Args, report: &mut Report, totals: &mut Totals) -> Result<()> {
    let mut begin = SnapshotRequest {
        header: Header::of::<SnapshotRequest>(),
        flags: MERCURY_SNAPSHOT_HASH,
        pool_pages: args.pool_pages,
        ..SnapshotRequest::default()
    };
    device::request(device, MERCURY_IOC_SNAPSHOT_BEGIN, &mut begin)
        .map_err(|error| device::explain(error, begin.outcome))?;
    let read = read_all(device, report)?;
    let mut end = SnapshotRequest { header: Header::of::<SnapshotRequest>(), ..SnapshotRequest::default() };
    device::request(device, MERCURY_IOC_SNAPSHOT_END, &mut end)
        .map_err(|error| device::explain(error, end.outcome))?;
    let status = end.status;
    report.check(status.exact == 1, || format!("the snapshot is invalid: {status:?}"));
    report.check(read == begin.memory_pages, || format!("{read} of {} pages", begin.memory_pages));
    report.check(status.copies == 0, || format!("copies are left: {status:?}"));
    totals.memory += read;
    totals.copied += status.copied;
    Ok(())
}

fn read_all(device: &File, report: &mut Report) -> Result<u64> {
    let all = Selection { request: MERCURY_IOC_SNAPSHOT_READ, flags: 0, hashed: true };
    frames::read(device, all, |frame| {
        report.check(frame.found == frame.expected, || {
            format!("{:#x} is not what it was; it is of kind {}", frame.phys, kind(frame.phys))
        });
    })
}

/// Returns the kernel's present description of a page: flags as in its `kernel-page-flags.h`, and
/// how often the page is mapped.
pub fn kind(frame: u64) -> String {
    let word = |path: &str| {
        let mut bytes = [0; 8];
        let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, frame / 4096 * 8));
        read.map_or_else(|error| error.to_string(), |()| format!("{:#x}", u64::from_le_bytes(bytes)))
    };
    format!("{}, mapped {}", word("/proc/kpageflags"), word("/proc/kpagecount"))
}
