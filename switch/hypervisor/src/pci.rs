//! PCI functions that are kept from writing to memory while a machine is put back to a snapshot.
//!
//! The configuration ports reach the first segment (PCI Local Bus 3.0, 3.2.2.3.2). A CPU that used the
//! ports at the time is put back too.

use crate::x86::Hardware;

/// A register of a function, as the address port takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Register(u32);

const COMMAND: u32 = 0x04;
const COMMAND_BUS_MASTER: u32 = 1 << 2;
/// The command's half of the register. The other half is the status, in which writing a one clears a bit.
const COMMAND_BITS: u32 = 0xFFFF;
const CLASS: u32 = 0x08;
const CLASS_SHIFT: u32 = 16;
/// Value of every register of a function that is not there.
const ABSENT: u32 = 0xFFFF_FFFF;
/// Bridges pass on the writes of the devices below them. Other ones (0680h) write by themselves.
const CLASS_BRIDGES: core::ops::RangeInclusive<u32> = 0x0600..=0x060A;
/// An IOMMU needs its own accesses to let others through, and writes to no memory but its own.
const CLASS_IOMMU: u32 = 0x0806;

impl Register {
    const ENABLE: u32 = 1 << 31;

    const fn of(bus: u32, device: u32, function: u32, register: u32) -> Self {
        Self(Self::ENABLE | bus << 16 | device << 11 | function << 8 | register)
    }

    const fn with(self, register: u32) -> Self {
        Self(self.0 & !0xFF | register)
    }

    /// Returns the register as the address port takes it.
    #[must_use]
    pub const fn address(self) -> u32 {
        self.0
    }
}

/// Keeps all functions on these buses from accessing memory, a bit for each bus. Returns the number of
/// functions.
pub fn silence(hardware: &mut impl Hardware, buses: &[u64; 4]) -> u64 {
    let mut silenced = 0;
    for bus in (0..256).filter(|bus| buses[*bus as usize / 64] >> (bus % 64) & 1 != 0) {
        for device in 0..32 {
            silenced += silence_device(hardware, bus, device);
        }
    }
    silenced
}

/// Silences the functions of one device. Virtual functions have no identity of their own, and stand where
/// there need be no function 0 (SR-IOV 1.1, 3.4.1.1).
fn silence_device(hardware: &mut impl Hardware, bus: u32, device: u32) -> u64 {
    (0..8).map(|function| silence_function(hardware, Register::of(bus, device, function, 0))).sum()
}

fn silence_function(hardware: &mut impl Hardware, function: Register) -> u64 {
    let command = hardware.read_pci(function.with(COMMAND));
    if command == ABSENT || command & COMMAND_BUS_MASTER == 0 {
        return 0;
    }
    let class = hardware.read_pci(function.with(CLASS)) >> CLASS_SHIFT;
    if CLASS_BRIDGES.contains(&class) || class == CLASS_IOMMU {
        return 0;
    }
    hardware.write_pci(function.with(COMMAND), command & COMMAND_BITS & !COMMAND_BUS_MASTER);
    // A read that has come back flushes the function's earlier writes to memory.
    let _ = hardware.read_pci(function.with(COMMAND));
    1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    const STATUS: u32 = 0x0010_0000;

    fn add(model: &mut Model, function: Register, class: u32) {
        for (register, value) in [(COMMAND, STATUS | 7), (CLASS, class << 16 | 1)] {
            model.pci.insert(function.with(register).address(), value);
        }
    }

    #[test]
    fn devices_are_silenced_and_bridges_are_not() {
        let mut model = Model::default();
        let function = |bus, device, function| Register::of(bus, device, function, 0);
        // The last one is a virtual function: there is no other one of its device.
        let disk = [function(0, 3, 0), function(0, 3, 5), function(200, 31, 7)];
        let others = [function(0, 0, 0), function(0, 1, 0), function(0, 2, 0), function(7, 0, 0)];
        add(&mut model, disk[0], 0x0108);
        add(&mut model, disk[1], 0x0680);
        add(&mut model, disk[2], 0x0106);
        add(&mut model, others[0], 0x0600);
        add(&mut model, others[1], 0x0604);
        add(&mut model, others[2], CLASS_IOMMU);
        add(&mut model, others[3], 0x0108);
        // Bus 7 is none that was asked for.
        assert_eq!(silence(&mut model, &[1, 0, 0, 1 << (200 - 192)]), 3);
        for disk in disk {
            assert_eq!(model.pci[&disk.with(COMMAND).address()], 3, "{disk:?}, and no status is cleared");
        }
        for other in others {
            assert_eq!(model.pci[&other.with(COMMAND).address()], STATUS | 7, "{other:?}");
        }
    }
}
