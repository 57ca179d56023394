//! Requests that read or replace the kernel's memory. The driver refuses them anyway, for want of a
//! snapshot or an image. The report has the code of each refusal: lockdown's comes first.

use std::fs::File;

use mercury_abi::{
    Header,
    code::Code,
    ioctl::{
        FirmwareRequest, LoadFramesRequest, LoadRequest, MERCURY_IOC_FIRMWARE, MERCURY_IOC_MEND,
        MERCURY_IOC_POSTMORTEM, MERCURY_IOC_RESTORE_BEGIN, MERCURY_IOC_RESTORE_GO, MERCURY_IOC_RESTORE_LOAD,
        MERCURY_IOC_RESTORE_READ, MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_IOC_SNAPSHOT_MACHINE,
        MERCURY_IOC_SNAPSHOT_PREPARE, MERCURY_IOC_SNAPSHOT_READ, MERCURY_IOC_SNAPSHOT_READ_PRESENT,
        MendRequest, Outcome, PostmortemRequest, RestartRequest, SnapshotReadRequest, SnapshotRequest,
    },
};

use crate::{Result, device, report::Report};

/// A flag that no version has.
const UNKNOWN_FLAG: u64 = 1 << 63;

/// Sends one request of each kind.
pub fn run(report: &mut Report) -> Result<()> {
    let device = device::open_to_control()?;
    for (name, command) in
        [("snapshot-prepare", MERCURY_IOC_SNAPSHOT_PREPARE), ("snapshot-begin", MERCURY_IOC_SNAPSHOT_BEGIN)]
    {
        let header = Header::of::<SnapshotRequest>();
        let request = SnapshotRequest { header, flags: UNKNOWN_FLAG, ..SnapshotRequest::default() };
        report.fact(name, refusal(&device, command, request, |request| request.outcome)?);
    }
    for (name, command) in
        [("snapshot-take", MERCURY_IOC_SNAPSHOT_READ), ("snapshot-look", MERCURY_IOC_SNAPSHOT_READ_PRESENT)]
    {
        let header = Header::of::<SnapshotReadRequest>();
        let request = SnapshotReadRequest { header, ..SnapshotReadRequest::default() };
        report.fact(name, refusal(&device, command, request, |request| request.outcome)?);
    }
    for (name, command) in
        [("snapshot-machine", MERCURY_IOC_SNAPSHOT_MACHINE), ("restore-begin", MERCURY_IOC_RESTORE_BEGIN)]
    {
        let header = Header::of::<RestartRequest>();
        let request = RestartRequest { header, flags: UNKNOWN_FLAG, ..RestartRequest::default() };
        report.fact(name, refusal(&device, command, request, |request| request.outcome)?);
    }
    for (name, command) in
        [("restore-load", MERCURY_IOC_RESTORE_LOAD), ("restore-read", MERCURY_IOC_RESTORE_READ)]
    {
        let header = Header::of::<LoadFramesRequest>();
        let request = LoadFramesRequest { header, ..LoadFramesRequest::default() };
        report.fact(name, refusal(&device, command, request, |request| request.outcome)?);
    }
    let header = Header::of::<FirmwareRequest>();
    let request = FirmwareRequest { header, page_phys: 1, ..FirmwareRequest::default() };
    report.fact("firmware", refusal(&device, MERCURY_IOC_FIRMWARE, request, |request| request.outcome)?);
    let header = Header::of::<PostmortemRequest>();
    let request = PostmortemRequest { header, flags: UNKNOWN_FLAG, ..PostmortemRequest::default() };
    report.fact("postmortem", refusal(&device, MERCURY_IOC_POSTMORTEM, request, |request| request.outcome)?);
    let header = Header::of::<MendRequest>();
    let request = MendRequest { header, ..MendRequest::default() };
    report.fact("mend", refusal(&device, MERCURY_IOC_MEND, request, |request| request.outcome)?);
    let header = Header::of::<LoadRequest>();
    let request = LoadRequest { header, flags: 1, ..LoadRequest::default() };
    report.fact("restore-go", refusal(&device, MERCURY_IOC_RESTORE_GO, request, |request| request.outcome)?);
    Ok(())
}

/// Returns the name of the code with which the driver refuses.
fn refusal<T: Copy>(
    device: &File,
    command: u32,
    mut request: T,
    outcome: impl Fn(&T) -> Outcome,
) -> Result<&'static str> {
    match device::request(device, command, &mut request) {
        Ok(()) => Err("the driver has done it".into()),
        Err(error) => Ok(Code::from_number(outcome(&request).code)
            .filter(|code| *code != Code::Ok)
            .ok_or_else(|| format!("no code: {error}"))?
            .name()),
    }
}
