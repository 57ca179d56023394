//! Addresses that a kernel has as numbers in its code, and what they become.
//!
//! No relocation names these numbers, because the compiler computes them from the kernel's memory
//! layout. They are found by decoding the code, by their values, which other numbers hardly ever
//! have:
//!
//! | number | as linked | hosted |
//! |---|---|---|
//! | fixed addresses | the 14 MiB below 0xFFFF_FFFF_FF80_0000 | the same low 30 bits |
//! | the processors' entry areas | 0xFFFF_FE00_0000_0000, 512 GiB | the same low 47 bits |
//! | the end of programs' memory, less the length of an access | up to 0x7FFF_FFFF_F000 | [`TASK_SIZE`] |
//! | a third and two thirds of it, where programs begin | 0x5555_5555_4AAA, or at a page | of [`TASK_SIZE`] |
//!
//! In some functions the end of programs' memory stands for the beginning of the kernel's; there it is 0.

use std::collections::VecDeque;

use iced_x86::{Code as Encoding, ConstantOffsets, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};

use crate::layout::{PAGE, TASK_SIZE};

const LINKED_TASK_SIZE: u64 = 0x7FFF_FFFF_F000;
/// An access is checked by comparing with the end less its length; no structure is longer than that.
const LONGEST: u64 = 0x1_0000;
const FIXED: std::ops::RangeInclusive<u64> = 0xFFFF_FFFF_FF20_0000..=0xFFFF_FFFF_FF7F_F000;
const VSYSCALL: u64 = 0xFFFF_FFFF_FF60_0000;
const ENTRY_AREAS: std::ops::Range<u64> = 0xFFFF_FE00_0000_0000..0xFFFF_FE80_0000_0000;
const PROGRAMS: u64 = LINKED_TASK_SIZE / 3 * 2;
/// At most so much is left to a stack.
const LARGEST_GAP: u64 = LINKED_TASK_SIZE / 6 * 5;
const LINKED_ALIGNED: u64 = LINKED_TASK_SIZE + PAGE - 1;
/// One page further, and it is where kernels begin, to code that looks for such addresses.
const LINKED_KERNEL: u64 = LINKED_TASK_SIZE + 0x1000;
const LINKED_LAST: u64 = LINKED_TASK_SIZE - 1;

/// Functions in which a number means something else than elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Any other function.
    Other,
    /// It asks whether an address is the kernel's, by comparing with the end of programs' memory.
    AsksForKernel,
    /// It puts a program's mappings below its stack, by rounding up a sum with the end of programs' memory.
    PlacesMappings,
    /// The function that puts a program's heap somewhere in the gigabyte after the program. It must
    /// not reach [`crate::layout::THUNKS`].
    PlacesHeap,
}

/// The names of these functions.
pub const SPECIAL: &[(Function, &[&str])] = &[
    (Function::AsksForKernel, &["exc_invalid_op", "handle_bug", "is_valid_bugaddr"]),
    (Function::PlacesMappings, &["arch_pick_mmap_layout"]),
    (Function::PlacesHeap, &["arch_randomize_brk"]),
];

const LINKED_HEAP: u64 = 1 << 30;
/// The range for a heap's place instead. The heap may grow to some seven times that size.
const HEAP: u64 = 1 << 27;

/// A change of an instruction's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// The address of the operand.
    pub address: u64,
    /// Its length in bytes, 4 or 8.
    pub length: u8,
    /// The linked number.
    pub old: u64,
    /// The new number.
    pub new: u64,
}

/// Returns the new number for a linked one.
#[must_use]
pub fn mapped(value: u64, function: Function) -> Option<u64> {
    match value {
        LINKED_LAST..=LINKED_KERNEL if function == Function::AsksForKernel => Some(0x1000),
        LINKED_HEAP if function == Function::PlacesHeap => Some(HEAP),
        PROGRAMS => Some(TASK_SIZE / 3 * 2),
        LARGEST_GAP => Some(TASK_SIZE / 6 * 5),
        LINKED_ALIGNED if function == Function::PlacesMappings => Some(TASK_SIZE + PAGE - 1),
        _ if value == PROGRAMS.next_multiple_of(PAGE) => Some((TASK_SIZE / 3 * 2).next_multiple_of(PAGE)),
        _ if value == (LINKED_TASK_SIZE / 3).next_multiple_of(PAGE) => {
            Some((TASK_SIZE / 3).next_multiple_of(PAGE))
        }
        VSYSCALL => None,
        _ if FIXED.contains(&value) => Some(value & 0x3FFF_FFFF),
        _ if ENTRY_AREAS.contains(&value) => Some(value & 0x7FFF_FFFF_FFFF),
        _ if (LINKED_TASK_SIZE - LONGEST..=LINKED_TASK_SIZE).contains(&value) => {
            Some(value - (LINKED_TASK_SIZE - TASK_SIZE))
        }
        _ => None,
    }
}

/// Finds all changes of a section of code. `moved` returns true for an address with a relocation.
pub fn find(
    bytes: &[u8],
    address: u64,
    moved: impl Fn(u64) -> bool,
    function: impl Fn(u64) -> Function,
) -> Vec<Patch> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut patches = Vec::new();
    let mut last: VecDeque<(Instruction, ConstantOffsets)> = VecDeque::new();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.code() == Encoding::INVALID {
            continue;
        }
        let offsets = decoder.get_constant_offsets(&instruction);
        patches.extend(shifted(&instruction, &last));
        if let Some(kept) = hides_the_kernel(&instruction, &last) {
            patches.retain(|patch| patch.address != kept);
        }
        last.truncate(SOON - 1);
        last.push_front((instruction, offsets));
        let asks = function(instruction.ip());
        if is_logic(&instruction) {
            continue;
        }
        for (offset, length, value) in fields(&instruction, &offsets) {
            let at = instruction.ip() + offset as u64;
            let Some(new) = mapped(value, asks) else { continue };
            if matches!(length, 4 | 8) && !moved(at) {
                patches.push(Patch { address: at, length: length as u8, old: value, new });
            }
        }
    }
    patches
}

/// Returns the address of the instruction that sets bit 0 of the error code of a program's fault.
/// The kernel sets it for all faults at its own addresses, so that a program learns nothing from
/// them. In this comparison all of the lower half are programs' addresses, so the number stays.
fn hides_the_kernel(set: &Instruction, before: &VecDeque<(Instruction, ConstantOffsets)>) -> Option<u64> {
    const NEAR: usize = 3;
    let is_bit = set.mnemonic() == Mnemonic::Or
        && set.op0_kind() == OpKind::Register
        && set.try_immediate(1).is_ok_and(|value| value == 1);
    let (load, offsets) = before.iter().take(NEAR).find(|(one, _)| {
        one.code() == Encoding::Mov_r64_imm64 && one.try_immediate(1).is_ok_and(|value| value == LINKED_LAST)
    })?;
    is_bit.then(|| load.ip() + offsets.immediate_offset() as u64)
}

/// The largest distance between the two instructions that make a number by shifting a smaller one.
const SOON: usize = 8;

/// Compilers make a number with many zeros at its end by loading what is before them, and shifting it.
fn shifted(shift: &Instruction, before: &VecDeque<(Instruction, ConstantOffsets)>) -> Option<Patch> {
    if shift.code() != Encoding::Shl_rm64_imm8 || shift.op0_kind() != OpKind::Register {
        return None;
    }
    let register = shift.op0_register().full_register();
    let by = u32::from(shift.immediate8()) & 63;
    let (load, offsets) = before.iter().find(|(one, _)| {
        one.op0_kind() == OpKind::Register && one.op0_register().full_register() == register
    })?;
    if load.code() != Encoding::Mov_r32_imm32 {
        return None;
    }
    let old = u64::from(load.immediate32());
    let new = mapped(old << by, Function::Other).filter(|_| by > 0)? >> by;
    Some(Patch { address: load.ip() + offsets.immediate_offset() as u64, length: 4, old, new })
}

/// Returns true if the instruction's number is a mask.
fn is_logic(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::And | Mnemonic::Or | Mnemonic::Xor | Mnemonic::Test)
}

/// Returns the numbers of an instruction: the offset, the length, and the extended value.
fn fields(instruction: &Instruction, offsets: &ConstantOffsets) -> Vec<(usize, usize, u64)> {
    let mut fields = Vec::new();
    if offsets.has_displacement() && !instruction.is_ip_rel_memory_operand() {
        fields.push((
            offsets.displacement_offset(),
            offsets.displacement_size(),
            instruction.memory_displacement64(),
        ));
    }
    if offsets.has_immediate() {
        let operand = (0..instruction.op_count()).find(|&n| instruction.try_immediate(n).is_ok());
        if let Some(value) = operand.and_then(|n| instruction.try_immediate(n).ok()) {
            fields.push((offsets.immediate_offset(), offsets.immediate_size(), value));
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_and_numbers_left_alone() {
        // movabs $0x7fffffffeff9,%rax ; mov -0xa04fd0(…),%eax as an address ; mov $-22,%eax ; movabs
        // $0xfffffe0000001000,%rdx
        let code = [
            &[0x48, 0xB8, 0xF9, 0xEF, 0xFF, 0xFF, 0xFF, 0x7F, 0, 0][..],
            &[0x8B, 0x04, 0x25, 0x30, 0xB0, 0x5F, 0xFF],
            &[0xB8, 0xEA, 0xFF, 0xFF, 0xFF],
            &[0x48, 0xBA, 0, 0x10, 0, 0, 0, 0xFE, 0xFF, 0xFF],
        ]
        .concat();
        let found = find(&code, 0x1000, |_| false, |_| Function::Other);
        let expected = [
            Patch { address: 0x1002, length: 8, old: 0x7FFF_FFFF_EFF9, new: TASK_SIZE - 7 },
            Patch { address: 0x100D, length: 4, old: 0xFFFF_FFFF_FF5F_B030, new: 0x3F5F_B030 },
            Patch { address: 0x1018, length: 8, old: 0xFFFF_FE00_0000_1000, new: 0x7E00_0000_1000 },
        ];
        assert_eq!(found, expected);
        assert!(find(&code, 0x1000, |_| true, |_| Function::Other).is_empty());
    }

    #[test]
    fn numbers_made_by_a_shift_are_found() {
        // mov $0x7fffff,%ebx ; mov %rbx,%rdi ; shl $41,%rbx
        let code = [0xBB, 0xFF, 0xFF, 0x7F, 0, 0x48, 0x89, 0xDF, 0x48, 0xC1, 0xE3, 0x29];
        let found = find(&code, 0x1000, |_| false, |_| Function::Other);
        assert_eq!(found, [Patch { address: 0x1001, length: 4, old: 0x7F_FFFF, new: 0x3F }]);
    }

    #[test]
    fn only_the_kernel_s_own_mask_is_found() {
        // movabs $0x7fffffffefff,%rdx ; mov %rbx,%rax ; or $1,%rax or $2,%rax ; cmp %rbp,%rdx
        let found = |bit| {
            let code = [
                &[0x48, 0xBA, 0xFF, 0xEF, 0xFF, 0xFF, 0xFF, 0x7F, 0, 0][..],
                &[0x48, 0x89, 0xD8],
                &[0x48, 0x83, 0xC8, bit],
                &[0x48, 0x39, 0xEA],
            ]
            .concat();
            find(&code, 0x1000, |_| false, |_| Function::Other).len()
        };
        assert_eq!((found(1), found(2)), (0, 1));
    }

    #[test]
    fn address_checks_find_the_kernel_everywhere() {
        assert_eq!(mapped(LINKED_TASK_SIZE, Function::AsksForKernel), Some(0x1000));
        assert_eq!(mapped(LINKED_KERNEL, Function::Other), None);
    }
}
