//! The configuration ports of PCI.

use core::arch::asm;

const ADDRESS: u16 = 0xCF8;
const DATA: u16 = 0xCFC;

/// Reads a register of a PCI function.
pub fn read_pci(address: u32) -> u32 {
    let value: u32;
    // SAFETY: a configuration read of the registers that `crate::pci` reads has no side effect. Interrupts
    // are off, and no other CPU uses the ports.
    unsafe {
        asm!("out dx, eax", in("dx") ADDRESS, in("eax") address, options(nomem, nostack, preserves_flags));
        asm!("in eax, dx", in("dx") DATA, out("eax") value, options(nomem, nostack, preserves_flags));
    }
    value
}

/// Writes a register of a PCI function.
pub fn write_pci(address: u32, value: u32) {
    // SAFETY: as above; `crate::pci` only takes rights away. Not `nomem`: what the device did before is in
    // memory.
    unsafe {
        asm!("out dx, eax", in("dx") ADDRESS, in("eax") address, options(nostack, preserves_flags));
        asm!("out dx, eax", in("dx") DATA, in("eax") value, options(nostack, preserves_flags));
    }
}
