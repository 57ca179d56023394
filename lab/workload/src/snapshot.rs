//! Snapshots of memory through the driver, with their proof: the hypervisor has hashed every page
//! at the instant, while no CPU ran the system, and each page that is read must have the same hash.
//! Needs a build with fault points.

use std::{fs::File, os::unix::fs::FileExt};

use mercury_abi::{
    Header,
    ioctl::{
        MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_IOC_SNAPSHOT_END, MERCURY_IOC_SNAPSHOT_READ,
        MERCURY_SNAPSHOT_HASH, SnapshotReadRequest, SnapshotRequest,
    },
    snapshot::hash,
};

use crate::{Result, device, report::Report, stop::Stop};

const PAGE_WORDS: usize = 512;
/// The number of frames of one request.
const BATCH: usize = 256;

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
    let taken = take_all(device, report)?;
    let mut end = SnapshotRequest { header: Header::of::<SnapshotRequest>(), ..SnapshotRequest::default() };
    device::request(device, MERCURY_IOC_SNAPSHOT_END, &mut end)
        .map_err(|error| device::explain(error, end.outcome))?;
    let status = end.status;
    report.check(status.exact == 1, || format!("the snapshot is invalid: {status:?}"));
    report.check(taken == begin.memory_pages, || format!("{taken} of {} pages", begin.memory_pages));
    report.check(status.copies == 0, || format!("copies are left: {status:?}"));
    totals.memory += taken;
    totals.copied += status.copied;
    Ok(())
}

fn take_all(device: &File, report: &mut Report) -> Result<u64> {
    let (mut frames, mut hashes) = (vec![0_u64; BATCH], vec![0_u64; BATCH]);
    let mut data = vec![[0_u64; PAGE_WORDS]; BATCH];
    let (mut cursor, mut taken) = (0, 0);
    while cursor != u64::MAX {
        let mut take = SnapshotReadRequest {
            header: Header::of::<SnapshotReadRequest>(),
            cursor_phys: cursor,
            end_phys: u64::MAX,
            count: BATCH as u64,
            frames_addr: address(&mut frames),
            data_addr: address(&mut data),
            hashes_addr: address(&mut hashes),
            ..SnapshotReadRequest::default()
        };
        device::request(device, MERCURY_IOC_SNAPSHOT_READ, &mut take)
            .map_err(|error| device::explain(error, take.outcome))?;
        for ((page, frame), expected) in data.iter().zip(&frames).zip(&hashes).take(take.count as usize) {
            let found = hash(page);
            report.check(found == *expected, || {
                format!("{frame:#x} is not what it was; it is of kind {}", kind(*frame))
            });
        }
        taken += take.count;
        cursor = take.cursor_phys;
    }
    Ok(taken)
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

fn address<T>(room: &mut [T]) -> u64 {
    room.as_mut_ptr().expose_provenance() as u64
}
