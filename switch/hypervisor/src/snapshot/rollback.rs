//! The whole machine goes back to the snapshot that is kept: because somebody wants it, because the kernel panicked,
//! because a CPU shut down.
//!
//! Whoever asks for it fetches the other CPUs by NMI, which reaches them with interrupts off, and halted, too. When all
//! have met, devices are silenced, every page that was written to gets its old content, and each CPU goes on at the
//! instant. Where one does not come, or the snapshot is not exact, nothing has happened.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::restart::{RestartCpu, SavedCpu};
use mercury_abi::shared::LogKind;
use mercury_abi::snapshot::{RollbackReason, RollbackReport};

use super::live::{page, with_memory};
use super::rendezvous::{Arrival, Rendezvous};
use crate::address::HostPhys;
use crate::cpu::Area;
use crate::vendor::Vendor;
use crate::x86::Hardware;
use crate::{pci, publish};

/// Ticks of the TSC that a CPU waits for the others: some ten seconds. A kernel that dies waits a second itself for
/// those that it stops.
const PATIENCE: u64 = 1 << 35;

static RENDEZVOUS: Rendezvous = Rendezvous::new();
/// Somebody has asked for it since the snapshot began.
static ASKED: AtomicBool = AtomicBool::new(false);
static REASON: AtomicU32 = AtomicU32::new(0);
static ASKER: AtomicU32 = AtomicU32::new(0);
static ASKER_RIP: AtomicU64 = AtomicU64::new(0);
static ASKED_TSC: AtomicU64 = AtomicU64::new(0);
/// The [`Code`] that it ended with.
static RESULT: AtomicU32 = AtomicU32::new(0);

/// Whether NMIs and shutdowns of a CPU exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// They do.
    On,
    /// They are the system's alone.
    Off,
}

/// What a snapshot that is kept needs besides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// Its CPUs.
    pub cpus: &'static [RestartCpu],
    /// For devices to come to rest.
    pub settle_ticks: u64,
    /// See [`pci::silence`].
    pub buses: [u64; 4],
}

/// A snapshot begins.
pub(super) fn begin() {
    RENDEZVOUS.begin();
    ASKED.store(false, Ordering::Relaxed);
}

/// Whether this CPU is one that a rollback may be waiting for.
pub fn wants<V: Vendor>(area: &Area<V>) -> bool {
    area.cpu.on_snapshot != 0 && ASKED.load(Ordering::Acquire)
}

/// Asks for it, and takes part.
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
    let kept = kept(area)?;
    if !ASKED.load(Ordering::Acquire) {
        // The last to write is as good as the first, for all of it is read when all have come.
        REASON.store(reason as u32, Ordering::Relaxed);
        ASKER.store(area.cpu.gate.cpu, Ordering::Relaxed);
        ASKER_RIP.store(V::interrupted(area).rip, Ordering::Relaxed);
        ASKED_TSC.store(hardware.tsc(), Ordering::Relaxed);
    }
    if !ASKED.swap(true, Ordering::AcqRel) {
        let others = kept.cpus.iter().filter(|cpu| cpu.cpu != area.cpu.gate.cpu);
        others.for_each(|cpu| hardware.send_nmi(cpu.apic_id));
    }
    take_part(area, hardware, kept)
}

/// Takes part in what another CPU has asked for.
///
/// # Errors
/// As for [`ask`].
#[cold]
#[inline(never)]
pub fn join<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<(), Code> {
    let kept = kept(area)?;
    with_memory(area, hardware, |area, hardware| take_part(area, hardware, kept))
}

/// The kernel stops this CPU because it panics: until it goes back it stays in reach. Where no NMI would reach it, it
/// waits here, and has been put back when this returns `true`.
///
/// # Errors
/// There is no snapshot to go back to, or nobody asked for it in time.
pub fn hold<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<bool, Code> {
    let kept = kept(area)?;
    if !V::ROLLS_BACK {
        return Err(Code::RollbackUnsupported);
    }
    area.cpu.is_held = 1;
    if V::is_in_nmi(area) {
        return with_memory(area, hardware, |area, hardware| take_part(area, hardware, kept)).map(|()| true);
    }
    Ok(false)
}

/// What this CPU would go back to.
fn kept<V: Vendor>(area: &Area<V>) -> Result<Kept, Code> {
    if area.cpu.on_snapshot == 0 {
        return Err(Code::NoSnapshot);
    }
    let guard = V::tables().lock().ok_or(Code::Crashed)?;
    guard.as_ref().ok_or(Code::NotLoaded)?.live.kept()
}

fn take_part<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, kept: Kept) -> Result<(), Code> {
    if !V::ROLLS_BACK {
        return Err(Code::RollbackUnsupported);
    }
    let own = kept.cpus.iter().find(|cpu| cpu.cpu == area.cpu.gate.cpu).ok_or(Code::RollbackMissed)?;
    let cpus = kept.cpus.len() as u32;
    match RENDEZVOUS.arrive(cpus) {
        Arrival::Last => {
            let result = work(area, hardware, kept);
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
    // SAFETY: memory that the driver has mapped and the snapshot has kept; the system above does not write to it before
    // all CPUs have left it. Made of integers.
    let saved = unsafe { page::<SavedCpu>(HostPhys::new(own.saved_phys)).read() };
    V::put_back(area, &saved);
    area.cpu.leave_pending = 0;
    area.cpu.on_snapshot = 0;
    area.cpu.is_held = 0;
    Ok(())
}

/// Whoever has not come may be writing.
fn missed<V: Vendor>() -> Code {
    if let Some(mut guard) = V::tables().lock()
        && let Some(nested) = guard.as_mut()
    {
        nested.live.spoil(Code::RollbackMissed);
    }
    Code::RollbackMissed
}

/// What is done while all CPUs are here, by one of them.
fn work<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, kept: Kept) -> Result<(), Code> {
    let met = hardware.tsc();
    let asked = ASKED_TSC.load(Ordering::Relaxed);
    let mut guard = V::tables().lock().ok_or(Code::Crashed)?;
    let live = &mut guard.as_mut().ok_or(Code::NotLoaded)?.live;
    // A CPU that came late may have used the pool up meanwhile: then devices must go on.
    live.kept()?;
    let functions = pci::silence(hardware, &kept.buses);
    while functions != 0 && hardware.tsc().wrapping_sub(met) < kept.settle_ticks {
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
        meet_ticks: met.wrapping_sub(asked),
        work_ticks,
        ..RollbackReport::default()
    };
    live.note(report);
    let ticks = report.meet_ticks.wrapping_add(work_ticks);
    let arguments = [u64::from(report.reason), u64::from(report.cpu), pages, ticks, report.rip_virt];
    publish::log(area, LogKind::RolledBack, met, arguments);
    Ok(())
}
