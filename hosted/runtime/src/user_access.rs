//! The kernel's uses of programs' memory, checked if programs are in processes of their own.
//!
//! The kernel asks of a program's address only if it is below the end of programs' memory. Here the
//! kernel's own memory and the monitor's are below, too, and all of them are mapped where the
//! kernel runs. So the address is checked once more at its use. Functions that leave the guest at
//! their beginning do that ([`USES`](crate::thunks::USES)). Any other instruction that may use a
//! program's memory is replaced by a jump or a trap. The kernel itself says which instructions
//! these are: a program's address may be bad, so each has an entry in the table of exceptions.
//!
//! The type of an entry tells its purpose:
//!
//! | types | used for |
//! |---|---|
//! | `UACCESS`, `COPY`, `UCOPY_LEN`, `FAULT`, `*_MCE_SAFE` | programs' memory |
//! | `IMM_REG` with -`EFAULT` | programs' memory; saving floating-point registers to the kernel's |
//! | other `IMM_REG`, `DEFAULT` and the rest | instructions that fault for themselves, the kernel's memory |
//!
//! A few functions use memory of either kind ([`EITHER`]). Only functions that leave the guest call
//! them for a program's memory; the kernel calls them for its own. An instruction that copies is
//! refused if neither end is a program's. The copies that survive machine checks are refused, too:
//! the kernel is not shown a processor for them.

use std::{collections::HashSet, ops::Range};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

use mercury_afterburner::kind::Kind;

use crate::{
    error::{Error, Result},
    kernel::{Change, Kernel},
    load::DISTANCE,
    memory::Memory,
};

/// Numbers of the types in Linux 6.1.
mod kind {
    pub const DEFAULT: u8 = 1;
    pub const FAULT: u8 = 2;
    pub const UACCESS: u8 = 3;
    pub const COPY: u8 = 4;
    /// From `CLEAR_FS` to `RDMSR_IN_MCE`.
    pub const THE_KERNELS: std::ops::RangeInclusive<u8> = 5..=13;
    pub const DEFAULT_MCE_SAFE: u8 = 14;
    pub const FAULT_MCE_SAFE: u8 = 15;
    pub const POP_REG: u8 = 16;
    pub const IMM_REG: u8 = 17;
    pub const FAULT_SGX: u8 = 18;
    pub const UCOPY_LEN: u8 = 19;
    pub const ZEROPAD: u8 = 20;
}

/// The size of an entry of the table of exceptions: the instruction's address, the address to go on
/// at, and the type, 32 bits each.
const ENTRY: u64 = 12;
/// The size of an entry of the table of switched jumps: the jump's address, its target, and its
/// key.
const JUMP: u64 = 16;
/// The size of an entry of the table of alternatives: the address, the replacement's address, the
/// feature, and both lengths.
const ALTERNATIVE: u64 = 12;

/// Functions that use a program's memory or the kernel's, with the functions that must be in
/// [`crate::thunks::USES`] for them. Only these call them for a program's memory.
const EITHER: [(&str, &[&str]); 9] = [
    ("copy_user_generic_unrolled", &["copy_user_generic_unrolled"]),
    ("copy_user_generic_string", &["copy_user_generic_string"]),
    ("copy_user_enhanced_fast_string", &["copy_user_enhanced_fast_string"]),
    ("copy_user_short_string", &["copy_user_enhanced_fast_string"]),
    ("__copy_user_nocache", &["__copy_user_nocache"]),
    ("csum_partial_copy_generic", &["csum_and_copy_from_user", "csum_and_copy_to_user"]),
    ("copy_from_kernel_nofault", &[]),
    ("copy_to_kernel_nofault", &[]),
    ("strncpy_from_kernel_nofault", &[]),
];

/// An instruction in whose place there is a trap, or a jump that leaves the guest. It may also be
/// an instruction after that one, displaced by the jump.
#[derive(Clone, Copy, Debug)]
pub struct UserAccess {
    /// The instruction, at its own address.
    pub instruction: Instruction,
    /// The address at which the instruction can be executed, together with those after it.
    pub code: u64,
}

/// The instructions that were replaced. The lists are in order, without gaps, because each process of a
/// machine has them.
#[derive(Clone, Debug, Default)]
pub struct UserAccesses {
    by_site: Vec<UserAccess>,
    /// The addresses at which the instructions are executed, and the original ones.
    sites: Vec<(u64, u64)>,
    displaced: Vec<UserAccess>,
}

impl UserAccesses {
    /// Takes instructions, and those that were displaced by the jump before them.
    #[must_use]
    pub fn new(mut replaced: Vec<UserAccess>, mut displaced: Vec<UserAccess>) -> Self {
        let mut sites: Vec<(u64, u64)> =
            replaced.iter().map(|access| (access.code, access.instruction.ip())).collect();
        sites.sort_unstable();
        for list in [&mut replaced, &mut displaced] {
            list.sort_unstable_by_key(|access| access.instruction.ip());
        }
        Self { by_site: replaced, sites, displaced }
    }

    /// Returns the address at which a displaced instruction can be executed.
    #[must_use]
    pub fn displaced(&self, address: u64) -> Option<u64> {
        find_at(&self.displaced, address).map(|access| access.code)
    }

    /// Returns the original instruction at an address.
    #[must_use]
    pub fn instruction(&self, address: u64) -> Option<Instruction> {
        self.at(address).or_else(|| find_at(&self.displaced, address)).map(|access| access.instruction)
    }

    /// Returns the replaced instruction at an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&UserAccess> {
        find_at(&self.by_site, address)
    }

    /// Returns the original address of the instruction that is executed at this address.
    #[must_use]
    pub fn site(&self, code: u64) -> Option<u64> {
        let found = self.sites.binary_search_by_key(&code, |(code, _)| *code);
        found.ok().map(|index| self.sites[index].1)
    }
}

/// Returns the instruction with this original address.
fn find_at(list: &[UserAccess], address: u64) -> Option<&UserAccess> {
    list.binary_search_by_key(&address, |access| access.instruction.ip()).ok().map(|index| &list[index])
}

/// Makes the error for a kernel of an unknown kind.
pub fn not_understood(what: impl std::fmt::Display) -> Error {
    Error::new(format!("the kernel's use of programs' memory is not understood: {what}"))
        .hint("use a kernel of 6.1 with --isolation=process, or leave the option out")
}

/// Returns the operands of an instruction that are in memory.
pub fn memory_operands(instruction: &Instruction) -> impl Iterator<Item = u32> {
    const MEMORY: std::ops::RangeInclusive<u32> = OpKind::MemorySegSI as u32..=OpKind::Memory as u32;
    (0..instruction.op_count()).filter(|&at| MEMORY.contains(&(instruction.op_kind(at) as u32)))
}

/// Returns true for an instruction that saves or restores floating-point registers.
#[must_use]
pub fn is_state(instruction: &Instruction) -> bool {
    is_extended_state(instruction)
        || matches!(
            instruction.mnemonic(),
            Mnemonic::Fxsave
                | Mnemonic::Fxsave64
                | Mnemonic::Fxrstor
                | Mnemonic::Fxrstor64
                | Mnemonic::Fnsave
                | Mnemonic::Frstor
        )
}

/// Returns true for an instruction that does so in XSAVE's format, whose length the processor
/// knows.
#[must_use]
pub fn is_extended_state(instruction: &Instruction) -> bool {
    matches!(
        instruction.mnemonic(),
        Mnemonic::Xsave
            | Mnemonic::Xsave64
            | Mnemonic::Xsaveopt
            | Mnemonic::Xsaveopt64
            | Mnemonic::Xsavec
            | Mnemonic::Xsavec64
            | Mnemonic::Xsaves
            | Mnemonic::Xsaves64
            | Mnemonic::Xrstor
            | Mnemonic::Xrstor64
            | Mnemonic::Xrstors
            | Mnemonic::Xrstors64
    )
}

fn is_supervisor_state(instruction: &Instruction) -> bool {
    matches!(
        instruction.mnemonic(),
        Mnemonic::Xsaves | Mnemonic::Xsaves64 | Mnemonic::Xrstors | Mnemonic::Xrstors64
    )
}

/// Returns true if an instruction with such an entry may use a program's memory. Returns nothing if
/// the type is unknown.
fn may_use_program(kind: u8, number: i16, instruction: &Instruction) -> Option<bool> {
    const EFAULT: i16 = -(libc::EFAULT as i16);
    Some(match kind {
        kind::UACCESS | kind::COPY | kind::UCOPY_LEN => true,
        // Only the kernel's own state has the supervisor's part.
        kind::FAULT_MCE_SAFE if is_supervisor_state(instruction) => false,
        kind::FAULT | kind::DEFAULT_MCE_SAFE | kind::FAULT_MCE_SAFE => true,
        kind::IMM_REG => number == EFAULT && !is_state(instruction),
        kind::DEFAULT | kind::POP_REG | kind::FAULT_SGX | kind::ZEROPAD => false,
        _ if kind::THE_KERNELS.contains(&kind) => false,
        _ => return None,
    })
}

/// Finds the instructions of a loaded kernel that must become traps, with their present addresses.
/// `hooked` names the functions that leave the guest at their beginning.
///
/// # Errors
/// If the kernel differs from known kernels.
pub fn find(kernel: &Kernel, memory: &Memory, hooked: &HashSet<&str>) -> Result<Vec<Instruction>> {
    let names = kernel.code_symbols();
    let alternatives = alternatives(kernel, memory)?;
    let mut found = Vec::new();
    for (address, kind, number) in exceptions(kernel, memory)? {
        let instruction = decode(kernel, memory, address)?;
        let owner = names.range(..=address).next_back();
        let is_owner = |name: &str| owner.is_some_and(|(_, names)| names.contains(&name));
        let place = || format!("{} ({address:#x}): {instruction}", owner.map_or("?", |(_, names)| names[0]));
        let may_use = may_use_program(kind, number, &instruction)
            .ok_or_else(|| not_understood(format!("an exception of type {kind} in {}", place())))?;
        if !may_use || memory_operands(&instruction).next().is_none() || kernel.is_initial(address) {
            continue;
        }
        if let Some((_, needed)) = EITHER.iter().find(|(name, _)| is_owner(name)) {
            let open = needed.iter().find(|name| kernel.symbol(name).is_ok() && !hooked.contains(*name));
            if let Some(open) = open {
                return Err(not_understood(format!(
                    "{open} does not begin as it does in kernels that are known"
                )));
            }
            continue;
        }
        let replaced = alternatives.iter().filter(|one| one.place.contains(&address));
        for alternative in replaced {
            // The functions that a call leads to are checked for themselves.
            if decode(kernel, memory, alternative.replacement)?.flow_control() != FlowControl::Call {
                return Err(not_understood(format!("an alternative for {}", place())));
            }
        }
        found.push(instruction);
    }
    Ok(found)
}

/// Places from which no instruction can be displaced, because a jump leads there or the kernel
/// changes the code. The addresses are the present ones.
#[derive(Debug)]
pub struct Fixed {
    targets: HashSet<u64>,
    replaced: Vec<Range<u64>>,
}

impl Fixed {
    /// Reads the places from a loaded kernel whose slots are still unfilled.
    ///
    /// # Errors
    /// If its tables differ from those of known kernels.
    pub fn find(kernel: &Kernel, memory: &Memory) -> Result<Self> {
        let mut targets: HashSet<u64> = kernel.code_symbols().keys().copied().collect();
        for code in &kernel.code {
            let mut bytes = vec![0; code.size as usize];
            memory.read(code.physical, &mut bytes).ok_or_else(|| not_understood(&code.name))?;
            for instruction in Decoder::with_ip(64, &bytes, code.address, DecoderOptions::NONE).iter() {
                targets.extend(
                    (instruction.near_branch_target() != 0).then(|| instruction.near_branch_target()),
                );
            }
        }
        for at in table(kernel, "__start___ex_table", "__stop___ex_table", ENTRY)? {
            targets.extend([pointer(kernel, memory, at)?, pointer(kernel, memory, at + 4)?]);
        }
        for at in table(kernel, "__start___jump_table", "__stop___jump_table", JUMP)? {
            targets.extend([pointer(kernel, memory, at)?, pointer(kernel, memory, at + 4)?]);
        }
        let mut targets: HashSet<u64> = targets.into_iter().map(|at| at.wrapping_add(DISTANCE)).collect();
        // The targets of all pointers were moved with the kernel.
        for relocation in &kernel.relocations {
            let mut bytes = [0; 4];
            targets.extend(match relocation.change {
                Change::Long => memory.read_long(relocation.physical),
                _ => memory.read(relocation.physical, &mut bytes).map(|()| u32::from_le_bytes(bytes).into()),
            });
        }
        let moved =
            |one: Alternative| one.place.start.wrapping_add(DISTANCE)..one.place.end.wrapping_add(DISTANCE);
        let replaced = alternatives(kernel, memory)?.into_iter().map(moved).collect();
        Ok(Self { targets, replaced })
    }

    /// Returns true if an instruction can be displaced together with the one before it.
    #[must_use]
    pub fn may_move(&self, instruction: &Instruction) -> bool {
        let place = instruction.ip()..instruction.next_ip();
        // The kernel replaces instructions without effect, and removes lock prefixes on one
        // processor.
        instruction.flow_control() == FlowControl::Next
            && !instruction.is_invalid()
            && !instruction.is_ip_rel_memory_operand()
            && !instruction.has_lock_prefix()
            && instruction.mnemonic() != Mnemonic::Nop
            && Kind::of(instruction).is_none()
            && !self.targets.contains(&place.start)
            && !self.replaced.iter().any(|one| one.start < place.end && place.start < one.end)
    }
}

/// Reads the table of exceptions: the linked address of each instruction, its type, and its number.
fn exceptions(kernel: &Kernel, memory: &Memory) -> Result<Vec<(u64, u8, i16)>> {
    let table = table(kernel, "__start___ex_table", "__stop___ex_table", ENTRY)?;
    let entries = table.map(|at| {
        let data = word(kernel, memory, at + 8)?;
        Ok((pointer(kernel, memory, at)?, data as u8, (data >> 16) as i16))
    });
    entries.collect()
}

/// Code that the kernel replaces.
struct Alternative {
    place: Range<u64>,
    replacement: u64,
}

fn alternatives(kernel: &Kernel, memory: &Memory) -> Result<Vec<Alternative>> {
    let table = table(kernel, "__alt_instructions", "__alt_instructions_end", ALTERNATIVE)?;
    let entries = table.map(|at| {
        let place = pointer(kernel, memory, at)?;
        let length = u64::from(word(kernel, memory, at + 8)? >> 16 & 0xFF);
        Ok(Alternative { place: place..place + length, replacement: pointer(kernel, memory, at + 4)? })
    });
    entries.collect()
}

fn table(kernel: &Kernel, start: &str, end: &str, entry: u64) -> Result<impl Iterator<Item = u64>> {
    let (start, end) = (kernel.symbol(start)?, kernel.symbol(end)?);
    if start > end || !(end - start).is_multiple_of(entry) {
        return Err(not_understood(format!("the table at {start:#x} has entries of another length")));
    }
    Ok((start..end).step_by(entry as usize))
}

fn word(kernel: &Kernel, memory: &Memory, address: u64) -> Result<u32> {
    let mut bytes = [0; 4];
    let read = kernel.physical(address).and_then(|at| memory.read(at, &mut bytes));
    read.map(|()| u32::from_le_bytes(bytes))
        .ok_or_else(|| not_understood(format!("nothing is at {address:#x}")))
}

/// Reads a pointer relative to itself.
fn pointer(kernel: &Kernel, memory: &Memory, at: u64) -> Result<u64> {
    Ok(at.wrapping_add_signed(i64::from(word(kernel, memory, at)?.cast_signed())))
}

/// Decodes the instruction that was linked to an address, at its present address.
fn decode(kernel: &Kernel, memory: &Memory, address: u64) -> Result<Instruction> {
    const LONGEST: usize = 15;
    let mut bytes = [0; LONGEST];
    let read = kernel.physical(address).and_then(|at| memory.read(at, &mut bytes));
    let now = address.wrapping_add(DISTANCE);
    let instruction = Decoder::with_ip(64, &bytes, now, DecoderOptions::NONE).decode();
    match read {
        Some(()) if !instruction.is_invalid() => Ok(instruction),
        _ => Err(not_understood(format!("no instruction is at {address:#x}"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn instruction(bytes: &[u8]) -> Instruction {
        Decoder::with_ip(64, bytes, 0x4100_0000, DecoderOptions::NONE).decode()
    }

    #[test]
    fn types_tell_whose_memory_it_is() {
        // lock cmpxchg %ecx,(%rbx)
        let exchange = instruction(&[0xF0, 0x0F, 0xB1, 0x0B]);
        // xsave64 (%rdi)
        let save = instruction(&[0x48, 0x0F, 0xAE, 0x27]);
        let whose = |kind, number, instruction| may_use_program(kind, number, instruction);
        assert_eq!(whose(kind::UACCESS, 0, &exchange), Some(true));
        assert_eq!(whose(kind::IMM_REG, -14, &exchange), Some(true));
        assert_eq!(whose(kind::IMM_REG, 1, &exchange), Some(false));
        assert_eq!(whose(kind::FAULT_MCE_SAFE, 0, &save), Some(true));
        assert_eq!(whose(kind::IMM_REG, -14, &save), Some(false));
        assert_eq!(whose(kind::ZEROPAD, 0, &exchange), Some(false));
        assert_eq!(whose(21, 0, &exchange), None);
    }

    #[test]
    fn operands_in_memory_are_found_in_strings_too() {
        // mov %eax,8(%rdi) ; mov 8(%rdi),%eax ; rep stosb ; rep movsb ; cpuid
        let operands = |bytes: &[u8]| memory_operands(&instruction(bytes)).collect::<Vec<u32>>();
        assert_eq!(operands(&[0x89, 0x47, 8]), [0]);
        assert_eq!(operands(&[0x8B, 0x47, 8]), [1]);
        assert_eq!(operands(&[0xF3, 0xAA]), [0]);
        assert_eq!(operands(&[0xF3, 0xA4]), [0, 1]);
        assert!(operands(&[0x0F, 0xA2]).is_empty());
    }

    #[test]
    fn jump_targets_and_changed_bytes_are_not_moved() {
        let at = 0x4100_0000;
        let fixed =
            |targets: &[u64], replaced| Fixed { targets: targets.iter().copied().collect(), replaced };
        let free = fixed(&[at + 1], Vec::from([at + 3..at + 8, at + 20..at + 24]));
        // add $8,%rax: as it is, if something leads there, and if it is in the place of an alternative
        let add = instruction(&[0x48, 0x83, 0xC0, 8]);
        assert!(fixed(&[], Vec::new()).may_move(&add));
        assert!(!fixed(&[at], Vec::new()).may_move(&add) && !free.may_move(&add));
        // inc %eax ; jne ; call ; nop ; lock inc (%rax) ; mov 0x10(%rip),%eax ; cli
        assert!(free.may_move(&instruction(&[0xFF, 0xC0])));
        for bytes in [
            &[0x75, 0][..],
            &[0xE8, 0, 0, 0, 0],
            &[0x0F, 0x1F, 0],
            &[0xF0, 0xFF, 0],
            &[0x8B, 5, 0x10, 0, 0, 0],
            &[0xFA],
        ] {
            assert!(!free.may_move(&instruction(bytes)), "{bytes:x?}");
        }
    }

    #[test]
    fn guards_are_found_by_both_addresses() {
        let access = UserAccess { instruction: instruction(&[0x89, 0x07]), code: 0x3800_0010 };
        let accesses = UserAccesses::new(vec![access], Vec::new());
        assert_eq!(accesses.at(0x4100_0000).unwrap().code, 0x3800_0010);
        assert!(accesses.displaced(0x4100_0000).is_none() && accesses.at(0x4100_0001).is_none());
        assert_eq!((accesses.site(0x3800_0010), accesses.site(0x3800_0012)), (Some(0x4100_0000), None));
    }
}
