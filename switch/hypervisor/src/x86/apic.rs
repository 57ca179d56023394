//! The local APIC, as far as one CPU sends another an NMI: with whatever mode the system has it in, and
//! even if the system has switched it off by software (APM vol. 2, 16.3.2 and 16.5).

use super::msr;
use crate::address::HostPhys;
use crate::native::direct_map;

const BASE_ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;
const BASE_X2APIC: u64 = 1 << 10;
/// The interrupt command register, and its other half.
const COMMAND: u64 = 0x300;
const COMMAND_HIGH: u64 = 0x310;
const X2APIC_COMMAND: u32 = 0x830;
/// The last command has not been sent yet.
const PENDING: u32 = 1 << 12;
/// NMI, asserted, to one physical identifier.
const SEND_NMI: u32 = 0x4400;
/// A command is sent within microseconds, or never.
const ATTEMPTS: u32 = 1 << 20;

/// Sends an NMI to the CPU with this identifier.
pub fn send_nmi(apic_id: u32) {
    let base = msr::read(msr::APIC_BASE).unwrap_or(0);
    if base & BASE_X2APIC != 0 {
        let _ = msr::write(X2APIC_COMMAND, u64::from(apic_id) << 32 | u64::from(SEND_NMI));
        return;
    }
    let page = HostPhys::new(base & BASE_ADDRESS).in_direct_map(direct_map()).as_u64();
    // SAFETY: while a snapshot is kept the driver maps this page, uncached, for the hypervisor; the
    // registers are those of this CPU, and interrupts are off.
    unsafe {
        let register = |offset: u64| core::ptr::with_exposed_provenance_mut::<u32>((page + offset) as usize);
        // The system may have been between the two halves of a command of its own.
        let theirs = register(COMMAND_HIGH).read_volatile();
        wait(register(COMMAND));
        register(COMMAND_HIGH).write_volatile(apic_id << 24);
        register(COMMAND).write_volatile(SEND_NMI);
        wait(register(COMMAND));
        register(COMMAND_HIGH).write_volatile(theirs);
    }
}

/// Waits for the last command to be sent.
///
/// # Safety
/// The address is that of the mapped register.
unsafe fn wait(command: *mut u32) {
    for _ in 0..ATTEMPTS {
        // SAFETY: by the caller's promise.
        if unsafe { command.read_volatile() } & PENDING == 0 {
            return;
        }
        core::hint::spin_loop();
    }
}
