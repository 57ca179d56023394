//! Rollback: the whole machine goes back to its snapshot, by order of the operator, because the kernel
//! panicked, or because a CPU shut down.
//!
//! The CPU that asks fetches the others by NMI, which reaches a CPU with interrupts off, and a halted one.
//! When all have met, devices are silenced, every page that was written gets its old content, and each CPU
//! goes on at the instant. If one does not come, or the snapshot is not exact, nothing has happened.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::restart::{RestartCpu, SavedCpu};
use mercury_abi::shared::LogKind;
use mercury_abi::snapshot::{RollbackReason, RollbackReport};

use super::rendezvous::{Arrival, Rendezvous};
use super::system_memory::{page, with_memory};
use crate::address::HostPhys;
use crate::cpu::Area;
use crate::vendor::Vendor;
use crate::x86::Hardware;
use crate::{pci, publish};

/// TSC ticks that a CPU waits for the others: some ten seconds. A kernel that panics waits a second itself
/// for the CPUs that it stops.
const PATIENCE: u64 = 1 << 35;

static RENDEZVOUS: Rendezvous = Rendezvous::new();
/// True once a CPU has asked for a rollback since the snapshot began.
static ASKED: AtomicBool = AtomicBool::new(false);
/// [`RollbackReason`] of the CPU that asked.
static REASON: AtomicU32 = AtomicU32::new(0);
static ASKER: AtomicU32 = AtomicU32::new(0);
static ASKER_RIP: AtomicU64 = AtomicU64::new(0);
static ASKED_TSC: AtomicU64 = AtomicU64::new(0);
/// [`Code`] with which the rollback ended.
static RESULT: AtomicU32 = AtomicU32::new(0);

/// Handling of NMIs and shutdowns of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// They exit, so that they can start a rollback.
    On,
    /// They are the system's alone.
    Off,
}

/// Data that a rollback needs besides the snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// CPUs, and where each has left its state of the instant.
    pub cpus: &'static [RestartCpu],
    /// TSC ticks for devices to come to rest, after they have been silenced.
    pub settle_ticks: u64,
    /// PCI buses of the devices to silence, a bit for each: see [`pci::silence`].
    pub buses: [u64; 4],
}

/// Has the events that start a rollback exit on this CPU, or no longer.
pub(super) fn watch<V: Vendor>(area: &mut Area<V>, watch: Watch) {
    if V::ROLLS_BACK {
        V::watch(area, watch);
    }
}

/// Begins with a new snapshot.
pub(super) fn begin() {
    RENDEZVOUS.begin();
    ASKED.store(false, Ordering::Relaxed);
}

/// Returns true if a rollback may be waiting for this CPU.
pub fn wants<V: Vendor>(area: &Area<V>) -> bool {
    area.cpu.on_snapshot != 0 && ASKED.load(Ordering::Acquire)
}

/// Asks for a rollback, and takes part.
///
/// # Errors
/// There is no snapshot to go back to, or a CPU is missing: nothing has happened.
#[cold]
#[inline(never)]
pub fn ask<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    reason: RollbackReason,
) -> Result<(), Code> {
    with_memory(area, hardware, |area, hardware| fetch(area, hardware, reason))
}

fn fetch<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    reason: RollbackReason,
) -> Result<(), Code> {
    let target = target(area)?;
    if !ASKED.load(Ordering::Acquire) {
        // The last to write is as good as the first, for all of it is read when all have come.
        REASON.store(reason as u32, Ordering::Relaxed);
        ASKER.store(area.cpu.gate.cpu, Ordering::Relaxed);
        ASKER_RIP.store(V::interrupted(area).rip, Ordering::Relaxed);
        ASKED_TSC.store(hardware.tsc(), Ordering::Relaxed);
    }
    if !ASKED.swap(true, Ordering::AcqRel) {
        let others = target.cpus.iter().filter(|cpu| cpu.cpu != area.cpu.gate.cpu);
        others.for_each(|cpu| hardware.send_nmi(cpu.apic_id));
    }
    take_part(area, hardware, target)
}

/// Takes part in the rollback that another CPU has asked for.
///
/// # Errors
/// As for [`ask`].
#[cold]
#[inline(never)]
pub fn join<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<(), Code> {
    let target = target(area)?;
    with_memory(area, hardware, |area, hardware| take_part(area, hardware, target))
}

/// Keeps this CPU in reach, which the kernel stops because it panics. In a handler of NMIs, where no NMI
/// would reach it, the CPU waits here. It has been put back when this returns `true`.
///
/// # Errors
/// There is no snapshot to go back to, or no CPU asked for a rollback in time.
pub fn hold<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<bool, Code> {
    let target = target(area)?;
    if !V::ROLLS_BACK {
        return Err(Code::RollbackUnsupported);
    }
    area.cpu.is_held = 1;
    if V::is_in_nmi(area) {
        return with_memory(area, hardware, |area, hardware| take_part(area, hardware, target))
            .map(|()| true);
    }
    Ok(false)
}

/// Returns what this CPU would go back to.
fn target<V: Vendor>(area: &Area<V>) -> Result<Target, Code> {
    if area.cpu.on_snapshot == 0 {
        return Err(Code::NoSnapshot);
    }
    let guard = V::tables().lock().ok_or(Code::Crashed)?;
    guard.as_ref().ok_or(Code::NotLoaded)?.live.target()
}

/// Meets the other CPUs, and goes back with them.
fn take_part<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    target: Target,
) -> Result<(), Code> {
    if !V::ROLLS_BACK {
        return Err(Code::RollbackUnsupported);
    }
    let own = target.cpus.iter().find(|cpu| cpu.cpu == area.cpu.gate.cpu).ok_or(Code::RollbackMissed)?;
    let cpus = target.cpus.len() as u32;
    match RENDEZVOUS.arrive(cpus) {
        Arrival::Last => {
            let result = work(area, hardware, target);
            RESULT.store(result.err().unwrap_or(Code::Ok) as u32, Ordering::Relaxed);
            RENDEZVOUS.open();
        }
        Arrival::Early if RENDEZVOUS.wait(hardware, cpus, PATIENCE) => {}
        Arrival::Early | Arrival::Late => return Err(missed::<V>()),
    }
    match Code::from_number(RESULT.load(Ordering::Relaxed)) {
        Some(Code::Ok) => {}
        code => return Err(code.unwrap_or(Code::Crashed)),
    }
    // SAFETY: memory that the driver has mapped and the snapshot has kept; the system above does not write
    // to it before all CPUs have left it. Made of integers.
    let saved = unsafe { page::<SavedCpu>(HostPhys::new(own.saved_phys)).read() };
    V::put_back(area, &saved);
    area.cpu.leave_pending = 0;
    area.cpu.on_snapshot = 0;
    area.cpu.is_held = 0;
    Ok(())
}

/// Makes the snapshot invalid: a CPU that has not come may be writing.
fn missed<V: Vendor>() -> Code {
    if let Some(mut guard) = V::tables().lock()
        && let Some(nested) = guard.as_mut()
    {
        nested.live.invalidate(Code::RollbackMissed);
    }
    Code::RollbackMissed
}

/// Does the work of one CPU while all are here.
fn work<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, target: Target) -> Result<(), Code> {
    let met = hardware.tsc();
    let asked = ASKED_TSC.load(Ordering::Relaxed);
    let mut guard = V::tables().lock().ok_or(Code::Crashed)?;
    let live = &mut guard.as_mut().ok_or(Code::NotLoaded)?.live;
    // A CPU that came late may have used the pool up meanwhile: then devices must go on.
    live.target()?;
    let functions = pci::silence(hardware, &target.buses);
    while functions != 0 && hardware.tsc().wrapping_sub(met) < target.settle_ticks {
        core::hint::spin_loop();
    }
    let pages = live.put_back()?;
    let work_ticks = hardware.tsc().wrapping_sub(met);
    let report = RollbackReport {
        reason: REASON.load(Ordering::Relaxed),
        cpu: ASKER.load(Ordering::Relaxed),
        rip_virt: ASKER_RIP.load(Ordering::Relaxed),
        pages,
        functions,
        rendezvous_ticks: met.wrapping_sub(asked),
        work_ticks,
        ..RollbackReport::default()
    };
    live.note(report);
    let ticks = report.rendezvous_ticks.wrapping_add(work_ticks);
    let arguments = [u64::from(report.reason), u64::from(report.cpu), pages, ticks, report.rip_virt];
    publish::log(area, LogKind::RolledBack, met, arguments);
    Ok(())
}
