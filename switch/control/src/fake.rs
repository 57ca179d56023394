//! A driver for tests: a machine that switches at once and in known times.

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
};
use mercury_abi::{
    code::Code,
    facts::CpuFacts,
    ioctl::{
        CpuStatus, FaultRequest, MERCURY_MODE_ATTACHED, MERCURY_MODE_NATIVE, MERCURY_STATE_ATTACHED,
        MERCURY_STATE_LOADED, MERCURY_STATE_UNLOADED, MeasureRequest, SwitchResult, SystemInfo,
    },
    shared::{CrashRecord, LOG_RECORDS, LogRecord, SHARED_MAGIC, SharedCpu},
    snapshot::SnapshotStatus,
};
use mercury_preflight::example::good_epyc;
use std::cell::{Cell, RefCell};

pub struct FakeDriver {
    /// CPUs that are attached.
    pub attached: RefCell<Vec<bool>>,
    /// True if the hypervisor is loaded.
    pub loaded: Cell<bool>,
    /// Code with which the next switch is refused.
    pub refuse: Cell<Option<Code>>,
    /// Code with which the next attach is refused.
    pub refuse_attach: Cell<Option<Code>>,
    /// True if there is a snapshot of memory.
    pub snapshot_live: Cell<bool>,
    /// True if CPUs attach that come online.
    pub want_all: Cell<bool>,
}

impl FakeDriver {
    /// Makes a machine of `cpus` CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            attached: vec![false; cpus].into(),
            loaded: Cell::new(false),
            refuse: Cell::new(None),
            refuse_attach: Cell::new(None),
            snapshot_live: Cell::new(false),
            want_all: Cell::new(false),
        }
    }

    fn cpu_count(&self) -> u32 {
        self.attached.borrow().len() as u32
    }
}

/// Describes a machine of `cpus` CPUs at 3 GHz, with nothing loaded.
pub fn system(cpus: u32) -> SystemInfo {
    let mut version = [0; 32];
    version[..5].copy_from_slice(b"1.2.3");
    SystemInfo {
        possible_cpus: cpus,
        tsc_khz: 3_000_000,
        memory_fixed: 2 << 20,
        memory_per_cpu: 40 << 10,
        version,
        ..SystemInfo::default()
    }
}

/// Makes an empty block of CPU `cpu`.
pub fn shared_cpu(cpu: u32) -> SharedCpu {
    SharedCpu {
        magic: SHARED_MAGIC,
        cpu,
        attached: 0,
        exits: [0; mercury_abi::shared::EXIT_REASONS],
        exit_ticks: 0,
        attaches: 0,
        detaches: 0,
        left_because: 0,
        log_written: 0,
        crash: CrashRecord::NONE,
        kvm_may: 0,
        reserved0: 0,
        read_only: 0,
        reserved: [0; 862],
        log: [LogRecord::default(); LOG_RECORDS],
    }
}

impl Driver for FakeDriver {
    fn system(&self) -> Result<SystemInfo> {
        let wanted = self.attached.borrow().iter().filter(|attached| **attached).count() as u32;
        let state = match (self.loaded.get(), wanted) {
            (false, _) => MERCURY_STATE_UNLOADED,
            (true, 0) => MERCURY_STATE_LOADED,
            (true, _) => MERCURY_STATE_ATTACHED,
        };
        let snapshot = SnapshotStatus { live: self.snapshot_live.get().into(), ..SnapshotStatus::default() };
        Ok(SystemInfo { state, wanted_cpus: wanted, snapshot, ..system(self.cpu_count()) })
    }

    fn facts(&self, cpu: u32) -> Result<Option<CpuFacts>> {
        let attached = self.attached.borrow().get(cpu as usize).copied();
        // An attached CPU reads EFER.SVME as set.
        let facts = |attached: bool| {
            let native = good_epyc(cpu);
            CpuFacts { efer: native.efer | u64::from(attached) << 12, ..native }
        };
        Ok(attached.map(facts))
    }

    fn load(&self) -> Result<()> {
        self.loaded.set(true);
        Ok(())
    }

    fn unload(&self) -> Result<()> {
        self.loaded.set(false);
        Ok(())
    }

    fn switch(&self, direction: Direction, cpus: Option<&CpuSet>) -> Result<Vec<SwitchResult>> {
        if let Some(code) = self.refuse.take() {
            return Err(Error::refused(direction.name(), code, Some(0), [0; 2]));
        }
        if direction == Direction::Attach
            && let Some(code) = self.refuse_attach.take()
        {
            return Err(Error::refused(direction.name(), code, Some(0), [0; 2]));
        }
        let wants = self.want_all.get();
        self.want_all.set(direction == Direction::Attach && (wants || cpus.is_none()));
        let mut results = Vec::new();
        for (cpu, attached) in (0..).zip(self.attached.borrow_mut().iter_mut()) {
            let target = direction == Direction::Attach;
            if *attached != target && cpus.is_none_or(|cpus| cpus.contains(cpu)) {
                *attached = target;
                results.push(SwitchResult { cpu, code: 0, ticks: 3000 * (u64::from(cpu) + 1) });
            }
        }
        Ok(results)
    }

    fn switch_for_now(&self, direction: Direction, cpus: &CpuSet) -> Result<()> {
        let wants = self.want_all.get();
        let switched = self.switch(direction, Some(cpus));
        self.want_all.set(wants);
        switched.map(drop)
    }

    fn status(&self) -> Result<Vec<CpuStatus>> {
        let mode = |attached: &bool| if *attached { MERCURY_MODE_ATTACHED } else { MERCURY_MODE_NATIVE };
        let modes = self.attached.borrow();
        let cpus = (0..).zip(modes.iter());
        Ok(cpus
            .map(|(cpu, attached)| CpuStatus { cpu, mode: mode(attached), ..CpuStatus::default() })
            .collect())
    }

    fn measure(&self, cpu: u32, count: u32) -> Result<MeasureRequest> {
        let ticks = 600 * u64::from(count);
        Ok(MeasureRequest { cpu, count, ticks, overhead_ticks: ticks / 10, ..MeasureRequest::default() })
    }

    fn fault(&self, _: FaultRequest) -> Result<u32> {
        Ok(0)
    }

    fn shared(&self) -> Result<Vec<SharedCpu>> {
        Ok((0..self.cpu_count()).map(shared_cpu).collect())
    }
}
