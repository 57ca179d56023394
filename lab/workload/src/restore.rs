//! The beginning of a restore. From then on the driver may have loaded frames into all memory beyond this
//! kernel's.

use std::fs;

use mercury_abi::{
    Header,
    ioctl::{MERCURY_IOC_RESTORE_BEGIN, RestartRequest},
    restart::{MERCURY_RANGE_FREE, MERCURY_RANGE_KEPT, RestartCpu, RestartRange},
};

use crate::{Result, device, report::Report, stop::Stop};

const PAGE: u64 = 4096;
/// Memory below this address differs from machine to machine.
const LOW: u64 = 1 << 20;
/// Pages at the end of a range that the image leaves out: the landing needs some.
const SPARE: u64 = 4096;
/// A kernel's text is somewhere in the upper half of the addresses.
const TEXT: u64 = 0xFFFF_FFFF_8100_0000;

/// Begins to restore a made-up machine with this one's CPUs and memory, and waits to be stopped.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    let device = device::open_to_control()?;
    let (cpus, ranges) = (cpus()?, ranges()?);
    let kept = ranges.iter().find(|range| range.kind == MERCURY_RANGE_KEPT).ok_or("no memory is kept")?;
    let mut request = RestartRequest {
        header: Header::of::<RestartRequest>(),
        resume_virt: TEXT,
        resume_phys: [kept.start_phys, 0],
        cpus_addr: cpus.as_ptr() as u64,
        ranges_addr: ranges.as_ptr() as u64,
        cpus_count: cpus.len() as u32,
        ranges_count: ranges.len() as u32,
        ..RestartRequest::default()
    };
    device::request(&device, MERCURY_IOC_RESTORE_BEGIN, &mut request)
        .map_err(|error| device::explain(error, request.outcome))?;
    eprintln!("begun");
    stop.wait();
    report.pass();
    Ok(())
}

fn cpus() -> Result<Vec<RestartCpu>> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    let numbers =
        text.lines().filter(|line| line.starts_with("apicid")).filter_map(|line| line.split(": ").nth(1));
    let apic_ids: Vec<u32> = numbers.map(str::parse).collect::<Result<_, _>>()?;
    Ok((0..).zip(apic_ids).map(|(cpu, apic_id)| RestartCpu { cpu, apic_id, saved_phys: 0 }).collect())
}

/// Returns the memory that the firmware described at boot.
fn ranges() -> Result<Vec<RestartRange>> {
    let mut ranges = Vec::new();
    for entry in fs::read_dir("/sys/firmware/memmap")? {
        let entry = entry?.path();
        let number = |name: &str| -> Result<u64> {
            let text = fs::read_to_string(entry.join(name))?;
            Ok(u64::from_str_radix(text.trim().trim_start_matches("0x"), 16)?)
        };
        let (start_phys, end) = (number("start")?, number("end")? + 1);
        if start_phys >= LOW && fs::read_to_string(entry.join("type"))?.trim() == "System RAM" {
            let pages = (end - start_phys) / PAGE;
            let kept = pages.saturating_sub(SPARE);
            ranges.push(RestartRange { start_phys, pages: kept, kind: MERCURY_RANGE_KEPT });
            let spare = start_phys + kept * PAGE;
            ranges.push(RestartRange { start_phys: spare, pages: pages - kept, kind: MERCURY_RANGE_FREE });
        }
    }
    ranges.retain(|range| range.pages > 0);
    Ok(ranges)
}
