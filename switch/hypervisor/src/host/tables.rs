//! GDT, IDT and task state of the hypervisor.
//!
//! An exit loads the selectors below, on AMD from the GDT in memory (APM vol. 2, 15.6; HARDWARE A-52).
//! Every vector has an interrupt stack, for the guard page must be survivable. CR4.MCE stays as the
//! system has it; vector 18 has a handler.

use core::mem::offset_of;

use mercury_abi::facts::TableRegister;
use mercury_abi::gate::DescriptorTable;

use super::entry::EXCEPTION_STUB_SIZE;
use crate::cpu::Area;
use crate::vendor::{TaskStateSegment, Vendor};

/// Code selector of the hypervisor.
pub const HOST_CS: u16 = 0x10;
/// Data selector of the hypervisor.
pub const HOST_DS: u16 = 0x18;
/// Task-state selector of the hypervisor.
pub const HOST_TR: u16 = 0x20;
/// Descriptor of a 64-bit code segment at CPL 0.
pub const CODE_DESCRIPTOR: u64 = 0x00AF_9B00_0000_FFFF;
/// Descriptor of a flat data segment at CPL 0.
pub const DATA_DESCRIPTOR: u64 = 0x00CF_9300_0000_FFFF;
/// Exception vectors with a handler: all that there are.
pub const VECTORS: usize = 32;

const VECTOR_NMI: usize = 2;
const VECTOR_DOUBLE_FAULT: usize = 8;
const VECTOR_MACHINE_CHECK: usize = 18;

/// The GDT: null, unused, code, data, task state (two entries).
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct HostGdt([u64; 6]);

/// The 64-bit task-state segment (APM vol. 2, 12.2.5), in 32-bit words because its 64-bit fields are
/// not aligned.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct TaskState([u32; 26]);

/// Offsets of the interrupt stacks' ends in the page of exception stacks.
const STACK_ENDS: [usize; 4] = [4096, 2304, 1536, 768];
/// Interrupt stack of ordinary faults.
const IST_FAULT: u8 = 1;
/// Interrupt stack of the double fault.
const IST_DOUBLE_FAULT: u8 = 2;
/// Interrupt stack of the machine check.
const IST_MACHINE_CHECK: u8 = 3;
/// Interrupt stack of the NMI.
const IST_NMI: u8 = 4;

/// An interrupt gate (APM vol. 2, 4.8.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Gate {
    low: u64,
    high: u64,
}

impl Gate {
    /// Returns a present interrupt gate to `target_virt` on interrupt stack `ist`.
    #[must_use]
    pub const fn new(target_virt: u64, ist: u8) -> Self {
        let low = (target_virt & 0xFFFF)
            | (HOST_CS as u64) << 16
            | (ist as u64) << 32
            | 0x8E00 << 32
            | (target_virt >> 16 & 0xFFFF) << 48;
        Self { low, high: target_virt >> 32 }
    }
}

/// The IDT, which all CPUs share.
#[repr(C, align(16))]
pub struct Idt(core::cell::UnsafeCell<[Gate; VECTORS]>);

// SAFETY: the table is only written by `fill`, always with the same values.
unsafe impl Sync for Idt {}

static IDT: Idt = Idt(core::cell::UnsafeCell::new([Gate { low: 0, high: 0 }; VECTORS]));

impl Idt {
    /// Writes every gate. `stubs_virt` is the address of the first exception stub. `nmi_virt` is that of the
    /// driver's handler of NMIs, or 0. The driver's handler runs on the stack in use, because it must work
    /// under the system's task state too.
    fn fill(&self, stubs_virt: u64, nmi_virt: u64) {
        for vector in 0..VECTORS {
            let gate = if vector == VECTOR_NMI && nmi_virt != 0 {
                Gate::new(nmi_virt, 0)
            } else {
                Gate::new(stubs_virt + vector as u64 * EXCEPTION_STUB_SIZE, stack_of(vector))
            };
            // SAFETY: in bounds; CPUs that race here write equal values.
            unsafe { self.0.get().cast::<Gate>().add(vector).write_volatile(gate) };
        }
    }
}

const fn stack_of(vector: usize) -> u8 {
    match vector {
        VECTOR_NMI => IST_NMI,
        VECTOR_DOUBLE_FAULT => IST_DOUBLE_FAULT,
        VECTOR_MACHINE_CHECK => IST_MACHINE_CHECK,
        _ => IST_FAULT,
    }
}

/// Fills the descriptor tables and the task state of a CPU's area, and the vendor's part.
pub fn prepare<V: Vendor>(area: &mut Area<V>) {
    const { Area::<V>::FITS };
    let base = core::ptr::from_mut(area).expose_provenance() as u64;
    let tss = base + offset_of!(crate::cpu::Cpu, tss) as u64;
    let gdt = base + offset_of!(crate::cpu::Cpu, gdt) as u64;
    let idt = core::ptr::from_ref(&IDT).expose_provenance() as u64;
    let stacks = base + offset_of!(Area<V>, exception_stacks) as u64;

    IDT.fill(super::entry::exception_stubs_virt(), area.cpu.gate.nmi.handler_virt);
    area.cpu.tss = TaskState::with_stacks(stacks);
    area.cpu.gdt = HostGdt::with_task_state(tss);
    area.cpu.host_gdtr = table(gdt, size_of::<HostGdt>());
    area.cpu.host_idtr = table(idt, size_of::<Idt>());
    area.cpu.control_phys = area.cpu.gate.area_phys + offset_of!(Area<V>, control) as u64;
    area.cpu.host_phys = area.cpu.gate.area_phys + offset_of!(Area<V>, host) as u64;
    area.cpu.vendor = V::KIND as u32;
    let limit = size_of::<TaskState>() as u32 - 1;
    V::prepare(area, TaskStateSegment { selector: HOST_TR, limit, base_virt: tss });
    area.cpu.prepared = 1;
}

const fn table(base_virt: u64, size: usize) -> DescriptorTable {
    DescriptorTable::new(TableRegister { base_virt, limit: size as u64 - 1 })
}

impl HostGdt {
    const fn with_task_state(tss_virt: u64) -> Self {
        let low = (size_of::<TaskState>() as u64 - 1)
            | (tss_virt & 0xFF_FFFF) << 16
            | 0x8B << 40
            | (tss_virt >> 24 & 0xFF) << 56;
        Self([0, 0, CODE_DESCRIPTOR, DATA_DESCRIPTOR, low, tss_virt >> 32])
    }

    /// Marks the task state available, as LTR demands.
    pub fn release_task_state(&mut self) {
        const BUSY: u64 = 1 << 41;
        self.0[4] &= !BUSY;
    }
}

impl TaskState {
    fn with_stacks(page_virt: u64) -> Self {
        let mut words = [0; 26];
        for (pair, end) in words[9..17].chunks_exact_mut(2).zip(STACK_ENDS) {
            let top = page_virt + end as u64;
            pair.copy_from_slice(&[top as u32, (top >> 32) as u32]);
        }
        // No I/O map: its offset is the segment's size.
        words[25] = (size_of::<Self>() as u32) << 16;
        Self(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_holds_the_whole_address() {
        let gate = Gate::new(0xFFFF_8881_2345_6780, IST_DOUBLE_FAULT);
        assert_eq!(gate.low, 0x2345_8E02_0010_6780);
        assert_eq!(gate.high, 0xFFFF_8881 & 0xFFFF_FFFF);
        assert_eq!(gate.low >> 48 << 16 | gate.low & 0xFFFF, 0x2345_6780);
    }

    #[test]
    fn task_state_holds_four_stacks() {
        let tss = TaskState::with_stacks(0xFFFF_8880_0000_3000);
        let stack = |n: usize| u64::from(tss.0[7 + 2 * n]) | u64::from(tss.0[8 + 2 * n]) << 32;
        assert_eq!(
            [stack(1), stack(2), stack(3), stack(4)],
            STACK_ENDS.map(|end| 0xFFFF_8880_0000_3000 + end as u64)
        );
        assert_eq!(tss.0[25] >> 16, 104);
    }

    #[test]
    fn descriptor_of_the_task_state() {
        let gdt = HostGdt::with_task_state(0xFFFF_8881_2345_6780);
        assert_eq!(gdt.0[4], 0x2300_8B45_6780_0067);
        assert_eq!(gdt.0[5], 0xFFFF_8881);
    }
}
