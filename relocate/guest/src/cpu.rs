//! A processor of the guest.

use crate::{
    calls::PORTS,
    entry::{self, Tables},
    features,
    fit::kvm_refused,
    layout::MONITOR,
    time,
};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, Msrs, kvm_cpuid_entry2, kvm_mp_state, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use mercury_abi::guest::{
    MERCURY_GUEST_LEAF, MERCURY_GUEST_LEAF_DESCRIPTION, MERCURY_GUEST_SIGNATURE_EBX,
    MERCURY_GUEST_SIGNATURE_ECX, MERCURY_GUEST_SIGNATURE_EDX,
};
use mercury_control::error::Result;
use mercury_image::{Cpu, Machine, Processor};

/// Bit of ECX of leaf 1: the local APIC's timer can wait for a value of the time-stamp counter. KVM has
/// it beside the features that it lists.
const TSC_DEADLINE: u32 = 1 << 24;
const TSC_DEADLINE_FLAG: &str = "tsc_deadline_timer";
/// IA32_FEATURE_CONTROL (SDM volume 4, table 2-2).
const FEATURE_CONTROL: u32 = 0x3A;

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
    cpuid.as_mut_slice().iter_mut().for_each(|entry| features::hide(entry, &machine.processor));
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
    time::set_rate(&vcpu, machine)?;
    set_feature_control(&vcpu, &feature_controls(&machine.processor, offered.as_slice()));
    let mut registers = vcpu.get_sregs().map_err(wrong("show the registers of a processor"))?;
    tables.enter(machine, &mut registers);
    vcpu.set_sregs(&registers).map_err(wrong("take the system registers of a processor"))?;
    vcpu.set_regs(&entry::registers(machine, cpu.saved_phys))
        .map_err(wrong("take the registers of a processor"))?;
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
        .map_err(wrong("start a processor"))?;
    Ok(vcpu)
}

/// Returns the values for IA32_FEATURE_CONTROL, the best first. The kernel has read the register at its
/// start, and its name for VMX says that the firmware has enabled VMX. Empty: it is no processor of Intel's.
fn feature_controls(processor: &Processor, offered: &[kvm_cpuid_entry2]) -> Vec<u64> {
    const LOCK: u64 = 1;
    const VMX_OUTSIDE_SMX: u64 = 1 << 2;
    /// Bit of ECX of leaf 1.
    const VMX: u32 = 1 << 5;
    if processor.vendor != "GenuineIntel" {
        return Vec::new();
    }
    let is_offered = offered.iter().any(|entry| entry.function == 1 && entry.ecx & VMX != 0);
    let has_vmx = is_offered && processor.flags.iter().any(|flag| flag == "vmx");
    has_vmx.then_some(LOCK | VMX_OUTSIDE_SMX).into_iter().chain([LOCK]).collect()
}

/// Sets IA32_FEATURE_CONTROL as the firmware has left it. A kernel that finds it unlocked when it starts a
/// processor writes bits there that KVM may not take. A KVM that takes no value shows 0, as before.
fn set_feature_control(vcpu: &VcpuFd, values: &[u64]) {
    for &data in values {
        let entry = kvm_msr_entry { index: FEATURE_CONTROL, data, ..kvm_msr_entry::default() };
        let Ok(registers) = Msrs::from_entries(&[entry]) else { return };
        if vcpu.set_msrs(&registers) == Ok(1) {
            return;
        }
    }
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
    fn intel_s_processors_are_locked_as_by_their_firmware() {
        let processor = |vendor: &str, flags: &[&str]| Processor {
            vendor: vendor.into(),
            flags: flags.iter().copied().map(str::to_owned).collect(),
            ..Processor::default()
        };
        let offers = |ecx| [kvm_cpuid_entry2 { function: 1, ecx, ..kvm_cpuid_entry2::default() }];
        assert_eq!(feature_controls(&processor("AuthenticAMD", &["svm"]), &offers(1 << 5)), [0; 0]);
        assert_eq!(feature_controls(&processor("GenuineIntel", &["vmx"]), &offers(1 << 5)), [5, 1]);
        assert_eq!(feature_controls(&processor("GenuineIntel", &["vmx"]), &offers(0)), [1]);
        assert_eq!(feature_controls(&processor("GenuineIntel", &[]), &offers(1 << 5)), [1]);
    }
}
