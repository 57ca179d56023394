//! A processor of the guest.

use crate::{
    calls::PORTS,
    entry::{self, Tables},
    fit::kvm_refused,
    layout::MONITOR,
};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, kvm_cpuid_entry2, kvm_mp_state};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use mercury_abi::{
    code::Code,
    guest::{
        MERCURY_GUEST_LEAF, MERCURY_GUEST_LEAF_DESCRIPTION, MERCURY_GUEST_SIGNATURE_EBX,
        MERCURY_GUEST_SIGNATURE_ECX, MERCURY_GUEST_SIGNATURE_EDX,
    },
};
use mercury_control::error::{Error, Result};
use mercury_image::{Cpu, Machine};

/// Bit of ECX of leaf 1: the local APIC's timer can wait for a value of the time-stamp counter. KVM has
/// it beside the features that it lists.
const TSC_DEADLINE: u32 = 1 << 24;
const TSC_DEADLINE_FLAG: &str = "tsc_deadline_timer";
/// Difference of clocks that a kernel does not notice, in parts of a million: its own calibration is no
/// better.
const CLOCK_TOLERANCE: u64 = 1000;

/// Returns CPUID as KVM offers it to the guest.
///
/// # Errors
/// KVM does not say.
pub fn offered(kvm: &Kvm, machine: &Machine) -> Result<CpuId> {
    permit_tiles();
    let mut cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|error| kvm_refused("list the features of processors", error))?;
    let has_deadline = machine.processor.flags.iter().any(|flag| flag == TSC_DEADLINE_FLAG);
    if has_deadline && kvm.check_extension(Cap::TscDeadlineTimer) {
        for entry in cpuid.as_mut_slice().iter_mut().filter(|entry| entry.function == 1) {
            entry.ecx |= TSC_DEADLINE;
        }
    }
    Ok(cpuid)
}

/// Asks the host for the large state of AMX, which KVM offers only to processes that have asked. A host
/// without AMX refuses, and then KVM does not offer it.
fn permit_tiles() {
    const REQUEST_FOR_GUESTS: libc::c_long = 0x1025;
    const TILES: libc::c_long = 18;
    // SAFETY: It takes numbers.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_FOR_GUESTS, TILES) };
}

/// Returns the end of the physical addresses that the guest's processors have.
#[must_use]
pub fn addresses_end(offered: &[kvm_cpuid_entry2]) -> u64 {
    const ADDRESSES: u32 = 0x8000_0008;
    let bits = offered.iter().find(|entry| entry.function == ADDRESSES).map_or(36, |entry| entry.eax & 0xFF);
    1_u64.checked_shl(bits).unwrap_or(u64::MAX)
}

/// Returns CPUID of one processor: its number, and the way to the monitor's devices.
///
/// # Errors
/// KVM has no room for so many leaves.
pub fn own(offered: &CpuId, apic_id: u32) -> Result<CpuId> {
    let mut entries: Vec<kvm_cpuid_entry2> = offered.as_slice().to_vec();
    for entry in &mut entries {
        match entry.function {
            1 => entry.ebx = entry.ebx & 0x00FF_FFFF | apic_id << 24,
            0xB | 0x1F => entry.edx = apic_id,
            0x8000_001E => entry.eax = apic_id,
            _ => {}
        }
    }
    entries.push(kvm_cpuid_entry2 {
        function: MERCURY_GUEST_LEAF,
        eax: MERCURY_GUEST_LEAF_DESCRIPTION,
        ebx: MERCURY_GUEST_SIGNATURE_EBX,
        ecx: MERCURY_GUEST_SIGNATURE_ECX,
        edx: MERCURY_GUEST_SIGNATURE_EDX,
        ..kvm_cpuid_entry2::default()
    });
    entries.push(kvm_cpuid_entry2 {
        function: MERCURY_GUEST_LEAF_DESCRIPTION,
        eax: MONITOR.start as u32,
        ebx: (MONITOR.start >> 32) as u32,
        ecx: PORTS.start.into(),
        ..kvm_cpuid_entry2::default()
    });
    CpuId::from_entries(&entries)
        .map_err(|error| kvm_refused("take so many leaves of CPUID", format!("{error:?}")))
}

/// Makes a processor that begins in the resume code of the image's kernel.
///
/// # Errors
/// KVM refuses a part of its state.
pub fn make(vm: &VmFd, offered: &CpuId, tables: &Tables<'_>, machine: &Machine, cpu: &Cpu) -> Result<VcpuFd> {
    let wrong = |what: &'static str| move |error: kvm_ioctls::Error| kvm_refused(what, error);
    let vcpu = vm.create_vcpu(cpu.apic_id.into()).map_err(wrong("make a processor"))?;
    vcpu.set_cpuid2(&own(offered, cpu.apic_id)?).map_err(wrong("take the features of a processor"))?;
    set_clock(&vcpu, machine)?;
    let mut registers = vcpu.get_sregs().map_err(wrong("show the registers of a processor"))?;
    tables.enter(machine, &mut registers);
    vcpu.set_sregs(&registers).map_err(wrong("take the system registers of a processor"))?;
    vcpu.set_regs(&entry::registers(machine, cpu.saved_phys))
        .map_err(wrong("take the registers of a processor"))?;
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
        .map_err(wrong("start a processor"))?;
    Ok(vcpu)
}

/// Gives the time-stamp counter the frequency of the machine's, which its kernel goes on to use.
fn set_clock(vcpu: &VcpuFd, machine: &Machine) -> Result<()> {
    let Some(wanted) = machine.timers.as_ref().map(|timers| timers.tsc_khz).filter(|khz| *khz != 0) else {
        return Ok(());
    };
    let here =
        u64::from(vcpu.get_tsc_khz().map_err(|error| kvm_refused("say how fast its clock is", error))?);
    if !differ(wanted, here) {
        return Ok(());
    }
    let set = u32::try_from(wanted).ok().and_then(|khz| vcpu.set_tsc_khz(khz).ok());
    set.ok_or_else(|| {
        let text = format!(
            "the machine of the image cannot be a guest here: its time-stamp counter runs at {wanted} kHz, \
             this host's at {here} kHz, and the processor cannot scale it"
        );
        Error::coded(Code::GuestTimers, text)
    })
}

fn differ(wanted: u64, here: u64) -> bool {
    wanted.abs_diff(here)
        > wanted / 1_000_000 * CLOCK_TOLERANCE + wanted % 1_000_000 * CLOCK_TOLERANCE / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_has_its_number_and_knows_the_monitor() {
        let entry = |function| kvm_cpuid_entry2 { function, ebx: u32::MAX, ..kvm_cpuid_entry2::default() };
        let offered = CpuId::from_entries(&[entry(1), entry(0xB), entry(0x8000_001E)]).expect("leaves");
        let own = own(&offered, 3).expect("leaves");
        let leaf = |number| *own.as_slice().iter().find(|one| one.function == number).expect("a leaf");
        assert_eq!(leaf(1).ebx, 0x03FF_FFFF);
        assert_eq!((leaf(0xB).edx, leaf(0x8000_001E).eax), (3, 3));
        let signature = leaf(MERCURY_GUEST_LEAF);
        let text: Vec<u8> = [signature.ebx, signature.ecx, signature.edx]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert_eq!(text, b"MercuryGuest");
        let description = leaf(MERCURY_GUEST_LEAF_DESCRIPTION);
        assert_eq!(u64::from(description.ebx) << 32 | u64::from(description.eax), MONITOR.start);
    }

    #[test]
    fn clocks_differ_by_more_than_a_thousandth() {
        assert!(!differ(3_000_000, 3_002_999) && !differ(3_000_000, 2_997_001) && !differ(999_000, 999_900));
        assert!(differ(3_000_000, 3_003_001) && differ(3_000_000, 2_400_000) && differ(1_000, 1_002));
    }
}
