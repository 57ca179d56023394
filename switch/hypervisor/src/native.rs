//! Operations on a native CPU: the driver comes through the gate, interrupts off.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::{BootInfo, FaultPoint, NativeOp};
use mercury_abi::shared::LogKind;
use mercury_preflight::{Finding, bits::cr4};
use spin::Mutex;

use crate::address::{HostPhys, HostVirt};
use crate::argument::Argument;
use crate::cpu::{Area, Phase};
use crate::host::entry::Next;
use crate::vendor::Vendor;
use crate::x86::{Hardware, Processor};
use crate::{fault, machine_check, nested, publish, speculation};

/// Kernel virtual address of physical address 0.
static DIRECT_MAP_VIRT: AtomicU64 = AtomicU64::new(0);
/// Virtual address at which the image was loaded.
static IMAGE_VIRT: AtomicU64 = AtomicU64::new(0);
/// 1 once the nested tables are complete.
static BUILT: AtomicU32 = AtomicU32::new(0);
/// Facts of the first CPU that was checked. The others are compared with it.
static REFERENCE: Mutex<Option<CpuFacts>> = Mutex::new(None);

/// Returns the virtual address at which the image was loaded.
#[must_use]
pub fn image_virt() -> u64 {
    IMAGE_VIRT.load(Ordering::Relaxed)
}

/// Returns the start of the kernel's direct map. The hypervisor's own memory lies at its addresses too.
#[must_use]
pub fn direct_map() -> HostVirt {
    HostVirt::new(DIRECT_MAP_VIRT.load(Ordering::Relaxed))
}

/// Returns the host-physical address of one of the image's own statics.
#[must_use]
pub fn phys_of<T>(own: &'static T) -> HostPhys {
    HostVirt::new(core::ptr::from_ref(own).expose_provenance() as u64).of_direct_map(direct_map())
}

/// Carries out one operation of the driver, on the hypervisor's tables and stack. [`crate::host::entry`]
/// calls it.
#[inline(always)]
pub fn enter<V: Vendor>(area: &mut Area<V>) -> Next {
    area.cpu.phase = Phase::Native;
    V::save_extended_state(area);
    let hardware = &mut Processor;
    match perform(area, hardware) {
        Ok(Next::Run) => machine_check::finish(area, hardware, Next::Run),
        result => {
            let code = result.err().unwrap_or(Code::Ok);
            V::put_back_native(area, hardware, code);
            V::restore_extended_state(area);
            machine_check::finish(area, hardware, Next::Leave)
        }
    }
}

fn perform<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<Next, Code> {
    const INIT: u32 = NativeOp::Init as u32;
    const BUILD: u32 = NativeOp::Build as u32;
    const PREFLIGHT: u32 = NativeOp::Preflight as u32;
    const ATTACH: u32 = NativeOp::Attach as u32;
    match area.cpu.gate.operation {
        INIT => init::<V>(&*argument(area)?, area.cpu.gate.argument, hardware)?,
        BUILD => build(area)?,
        PREFLIGHT => preflight(area, hardware)?,
        ATTACH => return attach(area, hardware),
        _ => return Err(Code::UnknownOperation),
    }
    Ok(Next::Leave)
}

/// Checks the operation's argument.
fn argument<V: Vendor, T>(area: &Area<V>) -> Result<Argument<T>, Code> {
    // SAFETY: with the operation the driver passes the address of a `T` in memory that it has mapped for
    // the hypervisor. It waits for the result before it uses the `T` again. `BootInfo` and `CpuFacts` are
    // made of integers only.
    unsafe { Argument::at(area.cpu.gate.argument) }
}

/// Takes the boot information over. Not inlined, like the next two: an attach needs no such stack.
#[inline(never)]
fn init<V: Vendor>(boot: &BootInfo, boot_virt: u64, hardware: &mut impl Hardware) -> Result<(), Code> {
    if boot.abi_version != MERCURY_ABI_VERSION {
        return Err(Code::AbiMismatch);
    }
    DIRECT_MAP_VIRT.store(boot.direct_map_virt, Ordering::Relaxed);
    IMAGE_VIRT.store(boot.image_virt, Ordering::Relaxed);
    BUILT.store(0, Ordering::Relaxed);
    *REFERENCE.lock() = None;
    nested::init::<V>(boot, boot_virt, hardware)
}

/// Builds part of the nested tables.
#[inline(never)]
fn build<V: Vendor>(area: &mut Area<V>) -> Result<(), Code> {
    nested::build::<V>().inspect_err(|_| area.cpu.gate.detail = [nested::wanted_pages(), 0])?;
    BUILT.store(1, Ordering::Release);
    Ok(())
}

/// Runs attach's own checks. `mercury doctor` runs the same code on the same facts.
#[inline(never)]
fn preflight<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<(), Code> {
    let facts: Argument<CpuFacts> = argument(area)?;
    // A processor that handles an INIT by itself leaves no record (HARDWARE A-30).
    publish::native(area, Code::CpuReset);
    // This CPU does not wait: the driver asks one CPU at a time, and the holder may have died with the lock.
    let mut reference = REFERENCE.try_lock().ok_or(Code::Crashed)?;
    if let Some(finding) = first_refusal(&facts, &mut reference) {
        area.cpu.gate.detail = finding.detail;
        return Err(finding.code);
    }
    if V::TYPES_FROM_MTRRS && !nested::types_are_current::<V>(hardware) {
        return Err(Code::MtrrChanged);
    }
    area.cpu.features = V::features(&facts);
    area.cpu.barriers = speculation::barriers(&facts);
    V::learn(area, &facts);
    publish::prepare(area);
    Ok(())
}

/// Returns the first reason not to attach a CPU, by itself or beside the one in `reference`. The facts of
/// that one are read afresh whenever its turn comes, for the kernel may have changed all CPUs meanwhile.
fn first_refusal(facts: &CpuFacts, reference: &mut Option<CpuFacts>) -> Option<Finding> {
    if let Some(finding) = mercury_preflight::first_refusal(facts) {
        return Some(finding);
    }
    let first = reference.get_or_insert(*facts);
    if first.cpu == facts.cpu {
        *first = *facts;
    }
    mercury_preflight::compare(first, facts).first_refusal().copied()
}

/// Attaches this CPU: fills the control block from the live state. The guest is what follows.
fn attach<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Result<Next, Code> {
    fault::check(area, FaultPoint::Entry)?;
    if BUILT.load(Ordering::Acquire) == 0 {
        return Err(Code::NotLoaded);
    }
    // The hypervisor's CR4 is of the load: a machine check that finds MCE clear is a shutdown (APM vol. 2,
    // 9.3.2).
    if area.cpu.gate.inward.cr4 & !area.cpu.gate.host_cr4 & cr4::MCE != 0 {
        return Err(Code::StateChanged);
    }
    area.cpu.leave_pending = 0;
    area.cpu.entered = 0;
    inject_faults(area);
    fault::check(area, FaultPoint::AfterSave)?;
    V::attach(area, hardware)?;
    fault::check(area, FaultPoint::AfterCapture)?;
    #[cfg(feature = "fault-injection")]
    V::corrupt(area);
    publish::attached(area);
    let tsc = hardware.tsc();
    publish::log(area, LogKind::Attached, tsc, [0; 5]);
    if fault::fires(area, FaultPoint::BeforeRun) {
        publish::departed(area, Code::Ok);
        return Err(Code::InjectedFault);
    }
    Ok(Next::Run)
}

#[cfg(not(feature = "fault-injection"))]
fn inject_faults<V: Vendor>(_: &mut Area<V>) {}

#[cfg(feature = "fault-injection")]
fn inject_faults<V: Vendor>(area: &mut Area<V>) {
    if fault::fires(area, FaultPoint::EntryPageFault) {
        fault::real::page_fault();
    }
    assert!(!fault::fires(area, FaultPoint::EntryPanic), "injected: entry");
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_preflight::example::good_epyc;

    #[test]
    fn cpus_are_compared_with_the_first() {
        let mut reference = None;
        assert_eq!(first_refusal(&good_epyc(0), &mut reference), None);
        assert_eq!(first_refusal(&good_epyc(1), &mut reference), None);
        let mut other = good_epyc(2);
        other.cpuid_8000_000a.edx ^= 1 << 3;
        let refused = first_refusal(&other, &mut reference).map(|finding| finding.code);
        assert_eq!(refused, Some(Code::CpusDiffer));
        assert_eq!(first_refusal(&good_epyc(3), &mut reference), None, "the odd one is no reference");
    }

    #[test]
    fn a_change_on_all_cpus_is_no_difference() {
        let mut reference = None;
        assert_eq!(first_refusal(&good_epyc(0), &mut reference), None);
        let later = |cpu: u32| CpuFacts { efer: 0x4d01, ..good_epyc(cpu) };
        assert_eq!(first_refusal(&later(0), &mut reference), None);
        assert_eq!(first_refusal(&later(1), &mut reference), None);
    }

    #[test]
    fn a_cpu_that_cannot_be_attached_is_no_reference() {
        let mut reference = None;
        let hopeless = CpuFacts { pat: 0, ..good_epyc(0) };
        assert_eq!(
            first_refusal(&hopeless, &mut reference).map(|finding| finding.code),
            Some(Code::PatUnsupported)
        );
        assert_eq!(reference, None);
    }
}
