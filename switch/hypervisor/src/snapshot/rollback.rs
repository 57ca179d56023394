//! Rollback: the whole machine goes back to its snapshot, by order of the operator, because the kernel
//! panicked, or because a CPU shut down.
//!
//! The CPU that asks fetches the others by NMI, which reaches a CPU with interrupts off, and a halted one.
//! When all have met, devices are silenced, every page that was written gets its old content, and each CPU
//! goes on at the instant, beneath the same snapshot. If one does not come, or the snapshot is not exact,
//! nothing has happened.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::restart::{RestartCpu, SavedCpu};
use mercury_abi::shared::LogKind;
use mercury_abi::snapshot::{EndedCpu, RollbackReason, RollbackReport};

use super::instant;
use super::rendezvous::{Arrival, Rendezvous};
use super::system_memory::{page, with_memory};
use crate::address::HostPhys;
use crate::cpu::{Area, Cpu, Interrupted};
use crate::vendor::{LastExit, Vendor};
use crate::x86::Hardware;
use crate::{pci, publish};

/// TSC ticks that a CPU waits for the others: some ten seconds. A kernel that panics waits a second itself
/// for the CPUs that it stops.
const PATIENCE: u64 = 1 << 35;

/// Rendezvous of this rollback and of the next one, in turns. The last CPU to come prepares the next one
/// while no CPU is there any more, since all have come here.
static RENDEZVOUS: [Rendezvous; 2] = [Rendezvous::new(), Rendezvous::new()];
/// Number of rollbacks since the snapshot began.
static ROUND: AtomicU32 = AtomicU32::new(0);
/// True once a CPU has asked for a rollback since the snapshot began.
static ASKED: AtomicBool = AtomicBool::new(false);
/// [`RollbackReason`] of the CPU that asked.
static REASON: AtomicU32 = AtomicU32::new(0);
static ASKER: AtomicU32 = AtomicU32::new(0);
static ASKER_RIP: AtomicU64 = AtomicU64::new(0);
static ASKED_TSC: AtomicU64 = AtomicU64::new(0);
/// Signature of the death: the same for the same death. 0: the machine goes back however often.
static SIGNATURE: AtomicU64 = AtomicU64::new(0);
/// TSC when this life began.
static LIFE_TSC: AtomicU64 = AtomicU64::new(0);
/// [`Code`] with which the rollback ended.
static RESULT: AtomicU32 = AtomicU32::new(0);

/// True while the last CPU to come puts memory back, which is neither life's then.
static AT_WORK: AtomicBool = AtomicBool::new(false);

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
    /// Root of the snapshot's tables.
    pub root: HostPhys,
    /// The machine goes back once only.
    pub once: bool,
    /// CPUs, and where each has left its state of the instant.
    pub cpus: &'static [RestartCpu],
    /// TSC ticks for devices to come to rest, after they have been silenced.
    pub settle_ticks: u64,
    /// PCI buses of the devices to silence, a bit for each: see [`pci::silence`].
    pub buses: [u64; 4],
    /// Address of an array of [`EndedCpu`], in the order of `cpus`; 0: none.
    pub ended_virt: u64,
    /// See [`mercury_abi::snapshot::SnapshotSetup::repeat_ticks`].
    pub repeat_ticks: u64,
}

/// A flat data segment as the descriptor has it, without the limit: present, writable, accessed, 32 bits wide
/// and counted in pages. Its privilege level is in bits 6:5.
const FLAT_DATA: u16 = 0xC093;

/// Returns the rights of a data segment of 64-bit mode by its selector, in the format of Intel's control
/// structure: bits 15:8 of AMD's are four lower. A null selector has none.
#[inline]
pub(crate) fn data_rights(selector: u16) -> Option<u16> {
    (selector & !3 != 0).then_some(FLAT_DATA | (selector & 3) << 5)
}

/// Has the events that start a rollback exit on this CPU, or no longer.
pub(super) fn watch<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, watch: Watch) {
    if V::rolls_back(area) {
        V::watch(area, hardware, watch);
    }
}

/// Deaths that a signature is compared with: the last two.
pub(super) const DEATHS: usize = 2;

/// A death: its signature, and its time.
pub(super) type Death = (u64, u64);

/// Returns how many of the last deaths were of the same, one after the other, and within `ticks`.
pub(super) fn same(earlier: &[Death; DEATHS], now: Death, ticks: u64) -> usize {
    let is_same = |(signature, tsc): &&Death| *signature == now.0 && now.1.wrapping_sub(*tsc) < ticks;
    if now.0 == 0 { 0 } else { earlier.iter().rev().take_while(is_same).count() }
}

/// Notes the instant, from which the first life is counted.
pub(super) fn note_instant(tsc: u64) {
    LIFE_TSC.store(tsc, Ordering::Relaxed);
}

/// Begins with a new snapshot.
pub(super) fn begin() {
    RENDEZVOUS.iter().for_each(Rendezvous::begin);
    ROUND.store(0, Ordering::Relaxed);
    ASKED.store(false, Ordering::Relaxed);
}

/// Lets the next life ask for a rollback, while all CPUs are here.
fn begin_next(round: u32) {
    RENDEZVOUS[(round as usize + 1) % 2].begin();
    ROUND.store(round + 1, Ordering::Relaxed);
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
    signature: u64,
) -> Result<(), Code> {
    with_memory(area, hardware, |area, hardware| fetch(area, hardware, reason, signature))
}

fn fetch<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    reason: RollbackReason,
    signature: u64,
) -> Result<(), Code> {
    let target = target(area)?;
    fetch_others(&area.cpu, hardware, &target, reason, signature);
    take_part(area, hardware, target)
}

/// Notes who asks and why, unless a CPU has asked before, and sends NMIs.
#[inline(never)]
fn fetch_others(
    asker: &Cpu,
    hardware: &mut impl Hardware,
    target: &Target,
    reason: RollbackReason,
    signature: u64,
) {
    if !ASKED.load(Ordering::Acquire) {
        // The last to write is as good as the first, for all of it is read when all have come.
        REASON.store(reason as u32, Ordering::Relaxed);
        ASKER.store(asker.gate.cpu, Ordering::Relaxed);
        ASKER_RIP.store(asker.interrupted.rip, Ordering::Relaxed);
        ASKED_TSC.store(hardware.tsc(), Ordering::Relaxed);
        SIGNATURE.store(signature, Ordering::Relaxed);
    }
    if !ASKED.swap(true, Ordering::AcqRel) {
        let others = target.cpus.iter().filter(|cpu| cpu.cpu != asker.gate.cpu);
        others.for_each(|cpu| hardware.send_nmi(cpu.apic_id));
    }
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
    area.cpu.is_held = 1;
    if V::is_in_nmi(area) {
        return with_memory(area, hardware, |area, hardware| take_part(area, hardware, target))
            .map(|()| true);
    }
    Ok(false)
}

/// Returns what this CPU would go back to.
#[inline(never)]
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
    let index = target.cpus.iter().position(|cpu| cpu.cpu == area.cpu.gate.cpu);
    let index = index.ok_or(Code::RollbackMissed)?;
    let own = target.cpus[index];
    if target.ended_virt != 0 {
        let last = V::last_exit(area);
        note_end(target.ended_virt, index, area.cpu.interrupted, &last, hardware.cr2());
    }
    let cpus = target.cpus.len() as u32;
    let round = ROUND.load(Ordering::Relaxed);
    let rendezvous = &RENDEZVOUS[round as usize % 2];
    match rendezvous.arrive(cpus) {
        Arrival::Last => {
            let result = at_work(|| work(area, hardware, target));
            RESULT.store(result.err().unwrap_or(Code::Ok) as u32, Ordering::Relaxed);
            if result.is_ok() {
                begin_next(round);
            }
            rendezvous.open();
        }
        Arrival::Early if rendezvous.wait(hardware, cpus, PATIENCE) => {}
        Arrival::Early | Arrival::Late => {
            end_if_half_back(area, hardware);
            return Err(missed::<V>());
        }
    }
    match Code::from_number(RESULT.load(Ordering::Relaxed)) {
        Some(Code::Ok) => {}
        code => return Err(code.unwrap_or(Code::Crashed)),
    }
    // SAFETY: memory that the driver has mapped and the snapshot has kept; the system above does not write
    // to it before all CPUs have left it. Made of integers.
    let saved = unsafe { page::<SavedCpu>(HostPhys::new(own.saved_phys)).read() };
    V::put_back(area, hardware, &saved, target.root);
    area.cpu.leave_pending = 0;
    area.cpu.is_held = 0;
    Ok(())
}

/// Notes the state of a CPU at the end of its life.
#[inline(never)]
fn note_end(ended_virt: u64, index: usize, interrupted: Interrupted, last: &LastExit, cr2: u64) {
    let Interrupted { rip, rax, rdx } = interrupted;
    let LastExit { rflags, cr3, cs, ss, mut registers, .. } = *last;
    (registers[0], registers[2]) = (rax, rdx);
    let cr2 = if last.cr2 == 0 { cr2 } else { last.cr2 };
    let at = core::ptr::with_exposed_provenance_mut::<EndedCpu>(ended_virt as usize).wrapping_add(index);
    // SAFETY: the driver keeps an entry for each of the CPUs until the end, in memory that it has mapped, and
    // reads it in the next life only. Each CPU writes its own, which is made of integers.
    unsafe {
        let EndedCpu { cpu, reserved, task_virt, .. } = at.read();
        let (cs, ss) = (cs.into(), ss.into());
        at.write(EndedCpu { cpu, reserved, task_virt, registers, rip, rflags, cr2, cr3, cs, ss });
    }
}

/// Does the work that may not fail half-way.
fn at_work<T>(work: impl FnOnce() -> T) -> T {
    AT_WORK.store(true, Ordering::Release);
    let result = work();
    AT_WORK.store(false, Ordering::Release);
    result
}

/// Takes note that a CPU has failed in the hypervisor. No CPU waits for it any more.
pub(crate) fn cpu_failed<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) {
    instant::give_up();
    end_if_half_back(area, hardware);
}

/// Ends the machine if the CPU at work has failed: no life could go on with this memory. Each CPU ends by
/// itself, since one in VMX operation would not be reset.
#[cold]
fn end_if_half_back<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) {
    if AT_WORK.load(Ordering::Acquire) {
        RENDEZVOUS.iter().for_each(Rendezvous::give_up);
        V::shut_down(area, hardware);
    }
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
    let same = live.die((SIGNATURE.load(Ordering::Relaxed), asked))?;
    let functions = silence(hardware, &target, met);
    #[cfg(feature = "fault-injection")]
    let dead_hash = live.hash_dead();
    #[cfg(not(feature = "fault-injection"))]
    let dead_hash = 0;
    let pages = live.put_back()?;
    let report = RollbackReport { pages, functions, dead_hash, same, ..report(hardware, met) };
    live.note(report);
    let ticks = report.rendezvous_ticks.wrapping_add(report.work_ticks);
    let arguments = [u64::from(report.reason), u64::from(report.cpu), pages, ticks, report.rip_virt];
    publish::log(area, LogKind::RolledBack, met, arguments);
    Ok(())
}

/// Takes bus mastering from devices, and lets them come to rest. Returns the number of functions.
#[inline(never)]
fn silence(hardware: &mut impl Hardware, target: &Target, met: u64) -> u64 {
    let functions = pci::silence(hardware, &target.buses);
    while functions != 0 && hardware.tsc().wrapping_sub(met) < target.settle_ticks {
        core::hint::spin_loop();
    }
    functions
}

/// Returns what is known of the rollback besides its pages and devices. The next life begins.
#[inline(never)]
fn report(hardware: &mut impl Hardware, met: u64) -> RollbackReport {
    let (now, asked) = (hardware.tsc(), ASKED_TSC.load(Ordering::Relaxed));
    RollbackReport {
        reason: REASON.load(Ordering::Relaxed),
        cpu: ASKER.load(Ordering::Relaxed),
        rip_virt: ASKER_RIP.load(Ordering::Relaxed),
        rendezvous_ticks: met.wrapping_sub(asked),
        work_ticks: now.wrapping_sub(met),
        lived_ticks: asked.wrapping_sub(LIFE_TSC.swap(now, Ordering::Relaxed)),
        ..RollbackReport::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Attached;

    /// No other test fails in the work of a rollback.
    #[test]
    fn a_machine_that_is_half_back_ends() {
        let mut cpu = Attached::new();
        cpu_failed(&mut cpu.area, &mut cpu.hardware);
        assert!(!cpu.hardware.shut_down, "memory is as it was");
        at_work(|| cpu_failed(&mut cpu.area, &mut cpu.hardware));
        assert!(cpu.hardware.shut_down);
        // Others, which waited for it.
        assert!(RENDEZVOUS.iter().all(|one| !one.wait(&mut cpu.hardware, 2, u64::MAX)));
        begin();
    }
}
