//! `/dev/mercury`: the one module that talks to the kernel in its own terms, and where the unsafe
//! code of the command is (the benchmarks have some of their own).

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
};
use mercury_abi::{
    Header,
    code::Code,
    facts::CpuFacts,
    ioctl::{
        CpuStatus, FaultRequest, LoadRequest, MERCURY_IOC_ATTACH, MERCURY_IOC_DETACH, MERCURY_IOC_FACTS,
        MERCURY_IOC_FAULT, MERCURY_IOC_LOAD, MERCURY_IOC_MEASURE, MERCURY_IOC_STATUS, MERCURY_IOC_SYSTEM,
        MERCURY_IOC_UNLOAD, MeasureRequest, Outcome, StatusRequest, SwitchRequest, SwitchResult, SystemInfo,
    },
    shared::{SHARED_CPU_SIZE, SHARED_MAGIC, SharedCpu},
};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    ioctl::{Updater, ioctl},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::os::fd::OwnedFd;

/// The device's path.
pub const PATH: &str = "/dev/mercury";

/// How the device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To look: any number of processes at a time.
    Observe,
    /// To change something: one process at a time.
    Control,
}

/// The open device.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
}

/// The outcome of an operation that has none in its structure.
const NO_OUTCOME: Outcome = Outcome { code: 0, cpu: u32::MAX, detail: [0; 2] };

impl Device {
    /// Opens the device.
    pub fn open(access: Access) -> Result<Self> {
        let flags = match access {
            Access::Observe => OFlags::RDONLY,
            Access::Control => OFlags::RDWR,
        };
        match rustix::fs::open(PATH, flags | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => Ok(Self { fd }),
            Err(Errno::BUSY) => Err(busy()),
            Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Err(no_driver()),
            Err(errno) => Err(Error::system("opening /dev/mercury", errno)),
        }
    }

    /// Performs one request. `Value` is the structure that `REQUEST` was made from.
    fn request<const REQUEST: u32, Value>(&self, value: &mut Value) -> rustix::io::Result<()> {
        const { assert!(REQUEST >> 16 & 0x3fff == size_of::<Value>() as u32) };
        // SAFETY: the request's number carries the size of `Value` (asserted above), so the driver
        // reads and writes exactly the bytes behind this exclusive reference.
        let updater = unsafe { Updater::<REQUEST, Value>::new(value) };
        // SAFETY: the requests of Mercury's driver touch no other memory than what `Value` says,
        // and the callers below put only addresses of their own live buffers there.
        unsafe { ioctl(&self.fd, updater) }
    }
}

/// The error of a request: the driver's reason where it gave one, else the errno's.
fn failure(action: &str, result: rustix::io::Result<()>, outcome: &Outcome) -> Result<()> {
    match (Error::from_outcome(action, outcome), result) {
        (Some(error), _) => Err(error),
        (None, Err(errno)) => Err(Error::system(action, errno)),
        (None, Ok(())) => Ok(()),
    }
}

fn no_driver() -> Error {
    Error { code: Some(Code::NotLoaded), ..Error::new(Exit::State, "Mercury's driver is not loaded") }
        .hint("`mercury load` loads it")
}

fn busy() -> Error {
    let holder =
        Device::open(Access::Observe).and_then(|device| device.system()).map(|info| info.controller_pid);
    let who = match holder {
        Ok(pid) if pid != 0 => format!("process {pid}{}", process_name(pid)),
        _ => "another process".into(),
    };
    Error { code: Some(Code::Busy), ..Error::new(Exit::Busy, format!("{who} controls Mercury")) }
        .hint("wait until it is done, or end it; `mercury status` and `mercury log` work meanwhile")
}

fn process_name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.is_empty() { String::new() } else { format!(" ({})", name.trim()) }
}

/// Checks that the driver speaks this command's version before anything else is asked of it.
fn same_version(theirs: &Header, ours: &Header) -> Result<()> {
    let mismatch =
        || Error::refused("talking to the driver", Code::AbiMismatch, None, [theirs.version.into(), 0]);
    if theirs == ours { Ok(()) } else { Err(mismatch()) }
}

impl Driver for Device {
    fn system(&self) -> Result<SystemInfo> {
        let header = Header::of::<SystemInfo>();
        let mut info = SystemInfo { header, ..SystemInfo::default() };
        let result = self.request::<MERCURY_IOC_SYSTEM, _>(&mut info);
        if result == Err(Errno::INVAL) {
            return Err(Error::refused("talking to the driver", Code::AbiMismatch, None, [0; 2]));
        }
        failure("asking the driver", result, &NO_OUTCOME)?;
        same_version(&info.header, &header)?;
        Ok(info)
    }

    fn facts(&self, cpu: u32) -> Result<Option<CpuFacts>> {
        let mut facts = CpuFacts { header: Header::of::<CpuFacts>(), cpu, ..CpuFacts::default() };
        match self.request::<MERCURY_IOC_FACTS, _>(&mut facts) {
            Err(Errno::NXIO) => Ok(None),
            result => failure("reading the processor", result, &NO_OUTCOME).map(|()| Some(facts)),
        }
    }

    fn load(&self) -> Result<()> {
        let mut request = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        let result = self.request::<MERCURY_IOC_LOAD, _>(&mut request);
        failure("load", result, &request.outcome)
    }

    fn unload(&self) -> Result<()> {
        let mut request = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        let result = self.request::<MERCURY_IOC_UNLOAD, _>(&mut request);
        failure("unload", result, &request.outcome)
    }

    fn switch(&self, direction: Direction, cpus: Option<&CpuSet>) -> Result<Vec<SwitchResult>> {
        let mask = cpus.map(CpuSet::mask).unwrap_or_default();
        let mut results = vec![SwitchResult::default(); self.system()?.possible_cpus as usize];
        let mut request = SwitchRequest {
            header: Header::of::<SwitchRequest>(),
            mask_addr: if cpus.is_some() { address(mask.as_ptr()) } else { 0 },
            mask_words: mask.len() as u32,
            results_count: results.len() as u32,
            results_addr: address(results.as_mut_ptr()),
            ..SwitchRequest::default()
        };
        let result = match direction {
            Direction::Attach => self.request::<MERCURY_IOC_ATTACH, _>(&mut request),
            Direction::Detach => self.request::<MERCURY_IOC_DETACH, _>(&mut request),
        };
        failure(direction.name(), result, &request.outcome)?;
        results.truncate(request.results_count as usize);
        Ok(results)
    }

    fn status(&self) -> Result<Vec<CpuStatus>> {
        let mut cpus = vec![CpuStatus::default(); self.system()?.possible_cpus as usize];
        let mut request = StatusRequest {
            header: Header::of::<StatusRequest>(),
            cpus_count: cpus.len() as u32,
            cpus_addr: address(cpus.as_mut_ptr()),
            ..StatusRequest::default()
        };
        let result = self.request::<MERCURY_IOC_STATUS, _>(&mut request);
        failure("asking for the status", result, &NO_OUTCOME)?;
        cpus.truncate(request.cpus_count as usize);
        Ok(cpus)
    }

    fn measure(&self, cpu: u32, count: u32) -> Result<MeasureRequest> {
        let header = Header::of::<MeasureRequest>();
        let mut request = MeasureRequest { header, cpu, count, ..MeasureRequest::default() };
        let result = self.request::<MERCURY_IOC_MEASURE, _>(&mut request);
        failure("measuring", result, &request.outcome)?;
        Ok(request)
    }

    fn fault(&self, request: FaultRequest) -> Result<u32> {
        let mut request = FaultRequest { header: Header::of::<FaultRequest>(), ..request };
        match self.request::<MERCURY_IOC_FAULT, _>(&mut request) {
            Err(Errno::NOTTY) => Err(Error::new(Exit::Failed, "this driver was built without fault points")
                .hint("only the lab's test builds have them")),
            result => failure("arming a fault", result, &NO_OUTCOME).map(|()| request.fired),
        }
    }

    fn shared(&self) -> Result<Vec<SharedCpu>> {
        let bytes = self.system()?.shared_size as usize;
        if bytes < SHARED_CPU_SIZE {
            return Ok(Vec::new());
        }
        let mapping = Mapping::new(&self.fd, bytes)?;
        Ok((0..bytes / SHARED_CPU_SIZE).map(|index| mapping.block(index)).collect())
    }
}

/// The address of a buffer as the driver takes it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// The hypervisor's published blocks, mapped read-only.
struct Mapping {
    base: *mut std::ffi::c_void,
    bytes: usize,
}

impl Mapping {
    fn new(fd: &OwnedFd, bytes: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice; nobody else knows it.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, fd, 0) };
        base.map(|base| Self { base, bytes }).map_err(|errno| Error::system("mapping the counters", errno))
    }

    /// A copy of one block, made while the hypervisor may write to it: each record of the log tells
    /// by its sequence number whether it is whole, so the ones that changed meanwhile are emptied.
    fn block(&self, index: usize) -> SharedCpu {
        assert!((index + 1) * SHARED_CPU_SIZE <= self.bytes);
        // SAFETY: inside the mapping (asserted), page-aligned, and every bit pattern is a SharedCpu.
        // Volatile, because the hypervisor writes concurrently.
        let read = || unsafe { self.base.cast::<SharedCpu>().add(index).read_volatile() };
        let mut block = read();
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        let again = read();
        for (record, later) in block.log.iter_mut().zip(&again.log) {
            if record.sequence != later.sequence {
                record.sequence = 0;
            }
        }
        if block.magic != SHARED_MAGIC {
            block.log.iter_mut().for_each(|record| record.sequence = 0);
        }
        block
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped; no reference into it exists, blocks are copies.
        let result = unsafe { munmap(self.base, self.bytes) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_carry_the_size_of_their_structure() {
        assert_eq!(MERCURY_IOC_FACTS >> 16 & 0x3fff, size_of::<CpuFacts>() as u32);
    }

    #[test]
    fn the_drivers_reason_wins_over_the_errno() {
        let outcome = Outcome { code: Code::NoSvm as u32, cpu: 0, detail: [0; 2] };
        let error = failure("attach", Err(Errno::IO), &outcome).expect_err("refused");
        assert_eq!(error.code, Some(Code::NoSvm));
        let error = failure("attach", Err(Errno::IO), &NO_OUTCOME).expect_err("failed");
        assert_eq!(error.code, None);
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let ours = Header::of::<SystemInfo>();
        let theirs = Header { version: 99, ..ours };
        assert_eq!(same_version(&theirs, &ours).map_err(|error| error.code), Err(Some(Code::AbiMismatch)));
    }
}
