//! Code for slots.
//!
//! A slot becomes a jump to a thunk. The thunk does what the slot did, in order, and jumps back
//! after it. Borrowed instructions are executed from their copy in the thunk. Frequent sensitive
//! instructions work on the processor's block at once. For the others the guest is left.
//!
//! A signal may come between any two instructions. So while interrupts are on, a thunk keeps state
//! only in the guest's registers, its stack and the block. An interrupt may be delivered in the
//! middle, and the guest comes back. The stack is used only where an interrupt could use it on a
//! bare machine: after STI, and by PUSHF and POPF.

use std::ops::Range;

use iced_x86::{
    BlockEncoderOptions, Code, Decoder, DecoderOptions, FlowControl, Instruction, MemoryOperand, Register,
    code_asm::{CodeAssembler, CodeLabel, byte_ptr, dword_ptr, qword_ptr, rax, rsp},
};
use mercury_afterburner::{
    kind::Kind,
    record::{Flags, Record},
};

use crate::{
    block::{RDI, RSI, at},
    error::{Error, Result},
    machine::VISIBLE,
    selectors,
    vcpu::NESTED,
};

/// Why the guest was left.
#[derive(Clone, Copy, Debug)]
pub enum Cause {
    /// For an instruction that is done by the monitor.
    Sensitive(Instruction),
    /// Interrupts have come on, and something waits.
    Pending,
    /// A function of the kernel's has been called that uses a program's memory.
    Uses(Use),
    /// An instruction of the kernel's is about to use a program's memory.
    UserAccess,
}

/// The use that a function makes of a program's memory, by the kernel's own conventions. The result
/// says if all of it is done, or that the address is not a program's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Copies EDX bytes from RSI to RDI, one of which is a program's. The number of bytes that are
    /// left is in RAX.
    Copy,
    /// Reads so many bytes at RAX into RDX; the result is in RAX.
    Get(usize),
    /// Writes so many bytes of RAX to RCX; the result is in RCX.
    Put(usize),
    /// Clears RCX bytes at RDI; the result, how many are left, is in RCX.
    Clear,
    /// Copies a string of less than RDX bytes from RSI to RDI; the result, its length, is in RAX.
    CopyString,
    /// Finds the end of a string of at most RSI bytes at RDI. Its length with the zero is in RAX,
    /// or 0 after a failure.
    MeasureString,
    /// Sums up EDX bytes at the address in this register. The result is in RAX, or 0 after a
    /// failure. All other cases are left to the function.
    Sum(usize),
    /// Gives a program addresses. All that could be done is left to the function.
    Give(Giving),
}

/// The way in which a function gives a program addresses. It decides about the result in RAX for a
/// refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Giving {
    /// Finds RDX bytes, at RSI if R8 says so, or near; an error.
    Find,
    /// Maps RDX bytes at RSI; an error.
    Map,
    /// Lets the mapping at RDI begin at RSI; an error.
    Grow,
    /// Has a mapping of RDX bytes moved to RSI; null.
    Move,
}

/// Functions that do it: those in which the kernel itself changes nothing at the beginning.
pub const USES: [(&str, Use); 23] = [
    ("copy_user_generic_unrolled", Use::Copy),
    ("copy_user_generic_string", Use::Copy),
    ("copy_user_enhanced_fast_string", Use::Copy),
    ("__copy_user_nocache", Use::Copy),
    ("__get_user_1", Use::Get(1)),
    ("__get_user_2", Use::Get(2)),
    ("__get_user_4", Use::Get(4)),
    ("__get_user_8", Use::Get(8)),
    ("__put_user_1", Use::Put(1)),
    ("__put_user_2", Use::Put(2)),
    ("__put_user_4", Use::Put(4)),
    ("__put_user_8", Use::Put(8)),
    ("clear_user_original", Use::Clear),
    ("clear_user_rep_good", Use::Clear),
    ("clear_user_erms", Use::Clear),
    ("strncpy_from_user", Use::CopyString),
    ("strnlen_user", Use::MeasureString),
    ("csum_and_copy_from_user", Use::Sum(RDI)),
    ("csum_and_copy_to_user", Use::Sum(RSI)),
    ("get_unmapped_area", Use::Give(Giving::Find)),
    ("mmap_region", Use::Give(Giving::Map)),
    ("expand_downwards", Use::Give(Giving::Grow)),
    ("copy_vma", Use::Give(Giving::Move)),
];

/// Bytes of the jump that takes the place of a function's beginning.
pub const HOOK_LENGTH: usize = 5;

/// A place where the guest is left.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    /// The reason for the exit.
    pub cause: Cause,
    /// The instruction's own address, which a fault belongs to.
    pub original: u64,
    /// The address at which the guest goes on.
    pub resume: u64,
}

/// Bytes of the instruction that names an exit: MOV of a number to an address of 32 bits.
pub const NAMING_LENGTH: u64 = 11;
/// The size of a jump to the monitor, in bytes.
const JUMP_LENGTH: u64 = 7;

impl Exit {
    /// Returns the address of the jump to the monitor.
    #[must_use]
    pub fn jump(&self) -> u64 {
        self.resume - JUMP_LENGTH
    }
}

/// A slot as it is loaded.
#[derive(Debug)]
pub struct Slot<'a> {
    /// The present address.
    pub address: u64,
    /// The relocated code.
    pub bytes: &'a [u8],
    /// Its sensitive instructions, by offset.
    pub records: &'a [Record],
}

/// The thunk of a slot.
#[derive(Debug)]
pub struct Thunk {
    /// To be put where it was made for.
    pub code: Vec<u8>,
    /// Places where it leaves the guest.
    pub exits: Vec<Exit>,
}

/// Returns true if a slot is filled. Others stay as they are: they trap in a process and are
/// recognized then, or they may be executed because they neither show nor change anything there.
#[must_use]
pub fn is_filled(records: &[Record]) -> bool {
    let stays = |record: &Record| record.flags.has(Flags::LEFT) || record.flags.has(Flags::ALTERNATIVE);
    !records.iter().any(stays) && !records.iter().all(|record| may_be_executed(record.kind))
}

/// Returns true if a process may execute the instruction with the same effect. The bases of FS and
/// GS are the guest's while it runs, and its rights to programs' memory do not depend on a flag.
fn may_be_executed(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Mode | Kind::Clac | Kind::Stac | Kind::ReadBase | Kind::WriteBase | Kind::Xgetbv | Kind::Verify
    )
}

/// Returns true if code with which the kernel replaces other code at its start can be left as it
/// is: it traps, or may be executed. Otherwise it would show the host's state.
#[must_use]
pub fn may_be_put_elsewhere(record: &Record) -> bool {
    const SHOWS: [Kind; 4] = [Kind::Pushf, Kind::Popf, Kind::Iret, Kind::Cpuid];
    !record.flags.has(Flags::ALTERNATIVE) || !SHOWS.contains(&record.kind)
}

/// The parts that all system calls of programs share.
#[derive(Clone, Copy, Debug)]
pub struct Gates {
    /// The address at which rewritten sites go on.
    pub system_call: u64,
    /// The address at which slots that return from a system call go on.
    pub system_return: u64,
    /// The address at which slots that return from a system call go on if programs run in processes
    /// of their own. The guest is left there.
    pub leaving: u64,
    /// The part of the return between its check for waiting interrupts and its end: its beginning and end.
    pub returning: [u64; 2],
    /// The instruction for which it leaves the guest if something waits.
    pub exit: Exit,
}

/// Makes it and its code, to be put at an address; its exit has this number.
///
/// Both parts work on the small stack. The guest's is a program's, which may keep something below
/// it. Interrupts are off.
///
/// # Errors
/// If the assembler does not like it.
pub fn gates(place: u64, exit: usize) -> Result<(Gates, Vec<u8>)> {
    use iced_x86::code_asm::{r11, r11d, rcx};
    let wrong = |error: iced_x86::IcedError| Error::bug(format!("the code for system calls: {error}"));
    const SET: i32 = 0x202;
    // Those that a system call keeps for a program.
    const KEPT: i32 = (VISIBLE | NESTED) as i32;
    const INTERRUPTS: i32 = 0x200;
    let mut code = CodeAssembler::new(64).map_err(wrong)?;
    let [mut call, mut back, mut looked, mut end, mut slow, mut leaving] =
        std::array::from_fn(|_| code.create_label());
    let mut all = || -> std::result::Result<(), iced_x86::IcedError> {
        // R11 gets the flags, and the kernel those that every bit of its mask is cleared in.
        code.set_label(&mut call)?;
        code.mov(qword_ptr(at::SCRATCH), rsp)?;
        code.mov(rsp, at::SMALL_STACK_END)?;
        code.pushfq()?;
        code.pop(r11)?;
        code.and(r11d, KEPT)?;
        code.or(r11d, SET)?;
        code.push(SET)?;
        code.popfq()?;
        code.push(qword_ptr(at::CALL_SEGMENTS))?;
        code.pop(qword_ptr(at::SEGMENTS))?;
        code.mov(rsp, qword_ptr(at::SCRATCH))?;
        code.jmp(qword_ptr(at::LSTAR))?;

        code.set_label(&mut back)?;
        code.mov(qword_ptr(at::SCRATCH), rsp)?;
        code.set_label(&mut looked)?;
        code.mov(rsp, at::SMALL_STACK_END)?;
        code.cmp(byte_ptr(at::PENDING), 0)?;
        code.jne(slow)?;
        code.test(r11d, INTERRUPTS)?;
        code.je(slow)?;
        code.push(r11)?;
        code.and(dword_ptr(rsp), KEPT)?;
        code.or(dword_ptr(rsp), SET)?;
        code.popfq()?;
        code.push(qword_ptr(at::RETURN_SEGMENTS))?;
        code.pop(qword_ptr(at::SEGMENTS))?;
        code.mov(rsp, qword_ptr(at::SCRATCH))?;
        code.mov(byte_ptr(at::IF_BYTE), 2)?;
        code.jmp(rcx)?;
        code.set_label(&mut end)?;
        code.nop()?;

        code.set_label(&mut slow)?;
        code.mov(rsp, qword_ptr(at::SCRATCH))?;
        code.set_label(&mut leaving)?;
        code.mov(dword_ptr(at::EXIT), exit as i32)?;
        code.jmp(qword_ptr(at::ENTRY))
    };
    all().map_err(wrong)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let done = code.assemble_options(place, options).map_err(wrong)?;
    let ip = |label| done.label_ip(label).map_err(wrong);
    let cause = Cause::Sensitive(Instruction::with(Code::Sysretq));
    let gates = Gates {
        system_call: ip(&call)?,
        system_return: ip(&back)?,
        leaving: ip(&leaving)?,
        returning: [ip(&looked)?, ip(&end)?],
        exit: Exit { cause, original: ip(&back)?, resume: ip(&back)? },
    };
    Ok((gates, done.inner.code_buffer))
}

/// Makes the tables of the decoder, which take most of a megabyte and come into being at their first use.
/// Processes made afterwards have them in common.
pub fn prepare_tables() {
    let _ = Decoder::new(64, &[0x90], DecoderOptions::NONE).decode();
}

/// Makes the code for a rewritten site at an address: the displaced instructions, then the work of
/// SYSCALL. It needs the address of the page, which is in memory, and the offset after the site.
///
/// Interrupts go off first. Before that nothing has happened, and an interrupt finds the program in
/// its own code. After that no interrupt comes. The assembler is not used, because its tables would
/// take memory in each process.
///
/// # Errors
/// If an address is out of an instruction's reach.
pub fn site(displaced: &[u8], page: u64, behind: u32, place: u64, system_call: u64) -> Result<Vec<u8>> {
    const LENGTH: u64 = 28;
    let far = |_| Error::bug("the code for a system call: an address is out of reach");
    let absolute = |address: u64| i32::try_from(address).map(i32::to_le_bytes).map_err(far);
    let end = place + displaced.len() as u64 + LENGTH;
    let distance = i32::try_from(system_call.wrapping_sub(end).cast_signed()).map_err(far)?;
    Ok([
        displaced,
        // mov byte ptr [...], 0
        &[0xC6, 0x04, 0x25],
        &absolute(at::IF_BYTE)?,
        &[0],
        // mov rcx, qword ptr [...]
        &[0x48, 0x8B, 0x0C, 0x25],
        &absolute(page)?,
        // Not ADD, because flags are the program's: lea rcx, [rcx + ...]
        &[0x48, 0x8D, 0x89],
        &absolute(behind.into())?,
        // jmp
        &[0xE9],
        &distance.to_le_bytes(),
    ]
    .concat())
}

/// Makes the code at an address for an instruction that leaves the guest first, and for the
/// instructions that the jump displaces. Its exit has this number. Returns the addresses at which
/// each can be executed.
///
/// # Errors
/// If the assembler does not like it.
pub fn access(displaced: &[Instruction], place: u64, number: usize) -> Result<(Thunk, Vec<u64>)> {
    let address = displaced.first().map_or(0, Instruction::ip);
    let wrong = |error: iced_x86::IcedError| Error::bug(format!("the code at {address:#x}: {error}"));
    let mut assembler = CodeAssembler::new(64).map_err(wrong)?;
    let mut labels: Vec<_> = displaced.iter().map(|_| assembler.create_label()).collect();
    let mut all = || -> std::result::Result<(), iced_x86::IcedError> {
        assembler.mov(dword_ptr(at::EXIT), number as i32)?;
        assembler.jmp(qword_ptr(at::ENTRY))?;
        for (instruction, label) in displaced.iter().zip(&mut labels) {
            assembler.set_label(label)?;
            assembler.add_instruction(*instruction)?;
        }
        assembler.jmp(displaced.last().map_or(0, Instruction::next_ip))
    };
    all().map_err(wrong)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let done = assembler.assemble_options(place, options).map_err(wrong)?;
    let places =
        labels.iter().map(|label| done.label_ip(label).map_err(wrong)).collect::<Result<Vec<_>>>()?;
    let resume = places.first().copied().unwrap_or(place);
    let exit = Exit { cause: Cause::UserAccess, original: address, resume };
    Ok((Thunk { code: done.inner.code_buffer, exits: vec![exit] }, places))
}

/// Makes the code at an address for a function that leaves the guest first. Its exit has this
/// number. If the guest goes on after the exit, the displaced instructions and the rest of the
/// function follow. Returns nothing if the function does not begin with movable instructions.
///
/// # Errors
/// If the assembler does not like it.
pub fn hook(
    what: Use,
    code: &[u8],
    address: u64,
    place: u64,
    number: usize,
    hole: &Range<u64>,
) -> Result<Option<(Thunk, usize)>> {
    let wrong = |error: iced_x86::IcedError| Error::bug(format!("the function at {address:#x}: {error}"));
    let stays = |one: &Instruction| one.flow_control() != FlowControl::Next || one.is_ip_rel_memory_operand();
    let Some((displaced, length)) = beginning(code, address, stays) else { return Ok(None) };
    let mut assembler = CodeAssembler::new(64).map_err(wrong)?;
    let mut behind = assembler.create_label();
    let mut all = || -> std::result::Result<(), iced_x86::IcedError> {
        if matches!(what, Use::Give(how) if how != Giving::Grow) {
            pass_free_addresses(&mut assembler, behind, hole)?;
        }
        assembler.mov(dword_ptr(at::EXIT), number as i32)?;
        assembler.jmp(qword_ptr(at::ENTRY))?;
        assembler.set_label(&mut behind)?;
        assembler.nop()?;
        displaced.iter().try_for_each(|instruction| assembler.add_instruction(*instruction))?;
        assembler.jmp(address + length as u64)
    };
    all().map_err(wrong)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let done = assembler.assemble_options(place, options).map_err(wrong)?;
    let resume = done.label_ip(&behind).map_err(wrong)?;
    let exit = Exit { cause: Cause::Uses(what), original: address, resume };
    Ok(Some((Thunk { code: done.inner.code_buffer, exits: vec![exit] }, length)))
}

/// Returns the instructions at a function's beginning that a jump displaces, and their bytes.
/// Returns nothing if one of them cannot be moved.
fn beginning(
    code: &[u8],
    address: u64,
    stays: impl Fn(&Instruction) -> bool,
) -> Option<(Vec<Instruction>, usize)> {
    let mut displaced = Vec::new();
    let mut length = 0;
    for instruction in Decoder::with_ip(64, code, address, DecoderOptions::NONE).iter() {
        if length >= HOOK_LENGTH {
            break;
        }
        if stays(&instruction) || instruction.is_invalid() {
            return None;
        }
        length += instruction.len();
        displaced.push(instruction);
    }
    Some((displaced, length))
}

/// Goes to the label if neither the second nor the third argument of a function is in the hole.
fn pass_free_addresses(
    assembler: &mut CodeAssembler,
    to: CodeLabel,
    hole: &Range<u64>,
) -> std::result::Result<(), iced_x86::IcedError> {
    use iced_x86::code_asm::{r11, rdx, rsi};
    let mut may_be = assembler.create_label();
    assembler.mov(rax, rsi)?;
    assembler.add(rax, rdx)?;
    assembler.jb(may_be)?;
    assembler.mov(r11, hole.start)?;
    assembler.cmp(rax, r11)?;
    assembler.jbe(to)?;
    assembler.mov(r11, hole.end)?;
    assembler.cmp(rsi, r11)?;
    assembler.jae(to)?;
    assembler.set_label(&mut may_be)?;
    assembler.nop()
}

/// Of the kernel's `struct vm_unmapped_area_info`: the limits between which it looks for free addresses.
const LOW_LIMIT: u64 = 16;
const HIGH_LIMIT: u64 = 24;
/// Results from here on are errors.
const ERRORS: i32 = -4095;

/// Makes the code at an address for the kernel's search for free addresses. It searches one side of
/// the hole and then the other, in the kernel's order. Returns nothing if the function's beginning
/// cannot be displaced.
///
/// # Errors
/// If the assembler does not like it.
pub fn search_beside(
    hole: &Range<u64>,
    code: &[u8],
    address: u64,
    place: u64,
) -> Result<Option<(Thunk, usize)>> {
    use iced_x86::code_asm::{r11, r12, r13, rbp, rbx, rdi};
    let wrong = |error: iced_x86::IcedError| Error::bug(format!("the function at {address:#x}: {error}"));
    let stays = |one: &Instruction| {
        let leads_back = (address..address + HOOK_LENGTH as u64).contains(&one.near_branch_target());
        let may_move = matches!(one.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch);
        !may_move || leads_back || one.is_ip_rel_memory_operand()
    };
    let Some((displaced, length)) = beginning(code, address, stays) else { return Ok(None) };
    let mut code = CodeAssembler::new(64).map_err(wrong)?;
    let [mut original, mut upwards, mut half, mut skip, mut done] =
        std::array::from_fn(|_| code.create_label());
    let (low, high) = (qword_ptr(rbx + LOW_LIMIT), qword_ptr(rbx + HIGH_LIMIT));
    let mut all = || -> std::result::Result<(), iced_x86::IcedError> {
        code.mov(r11, hole.end)?;
        code.cmp(qword_ptr(rdi + LOW_LIMIT), r11)?;
        code.jae(original)?;
        code.mov(r11, hole.start)?;
        code.cmp(qword_ptr(rdi + HIGH_LIMIT), r11)?;
        code.jbe(original)?;
        for register in [rbx, rbp, r12, r13] {
            code.push(register)?;
        }
        // One more, for the stack is at a multiple of 16 at calls.
        code.push(rax)?;
        code.mov(rbx, rdi)?;
        code.mov(r12, low)?;
        code.mov(r13, high)?;
        code.test(byte_ptr(rbx), 1)?;
        code.je(upwards)?;
        // From the top down.
        code.mov(rax, hole.end)?;
        code.mov(low, rax)?;
        code.call(half)?;
        code.cmp(rax, ERRORS)?;
        code.jb(done)?;
        code.mov(low, r12)?;
        code.mov(rax, hole.start)?;
        code.mov(high, rax)?;
        code.call(half)?;
        code.jmp(done)?;
        code.set_label(&mut upwards)?;
        code.mov(rax, hole.start)?;
        code.mov(high, rax)?;
        code.call(half)?;
        code.cmp(rax, ERRORS)?;
        code.jb(done)?;
        code.mov(high, r13)?;
        code.mov(rax, hole.end)?;
        code.mov(low, rax)?;
        code.call(half)?;
        code.set_label(&mut done)?;
        code.mov(low, r12)?;
        code.mov(high, r13)?;
        code.pop(r11)?;
        for register in [r13, r12, rbp, rbx] {
            code.pop(register)?;
        }
        code.ret()?;
        // One side, if there is anything.
        code.set_label(&mut half)?;
        code.mov(r11, low)?;
        code.cmp(high, r11)?;
        code.jbe(skip)?;
        code.mov(rdi, rbx)?;
        code.set_label(&mut original)?;
        displaced.iter().try_for_each(|instruction| code.add_instruction(*instruction))?;
        code.jmp(address + length as u64)?;
        code.set_label(&mut skip)?;
        code.mov(rax, i64::from(-libc::ENOMEM))?;
        code.ret()
    };
    all().map_err(wrong)?;
    let code = code.assemble(place).map_err(wrong)?;
    Ok(Some((Thunk { code, exits: Vec::new() }, length)))
}

/// Makes the code at an address for one instruction: the instruction, and a jump to the next one.
///
/// # Errors
/// If the assembler does not like it.
pub fn stand_in(instruction: &Instruction, place: u64) -> Result<Vec<u8>> {
    let wrong = |error: iced_x86::IcedError| {
        Error::bug(format!("the instruction at {:#x}: {error}", instruction.ip()))
    };
    let mut assembler = CodeAssembler::new(64).map_err(wrong)?;
    assembler.add_instruction(*instruction).map_err(wrong)?;
    assembler.jmp(instruction.next_ip()).map_err(wrong)?;
    assembler.assemble(place).map_err(wrong)
}

struct Builder<'a> {
    assembler: CodeAssembler,
    /// The exits, with the label after each.
    exits: Vec<(Cause, u64, CodeLabel)>,
    /// The number of the first exit.
    first: usize,
    slot: &'a Slot<'a>,
}

/// Makes the code for a slot, to be put at an address; its exits are numbered from `first` on.
///
/// # Errors
/// If the slot is not what its records say.
pub fn build(slot: &Slot<'_>, at: u64, first: usize) -> Result<Thunk> {
    let wrong = |error: iced_x86::IcedError| Error::bug(format!("the slot at {:#x}: {error}", slot.address));
    let assembler = CodeAssembler::new(64).map_err(wrong)?;
    let mut builder = Builder { assembler, exits: Vec::new(), first, slot };
    builder.all().map_err(wrong)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let done = builder.assembler.assemble_options(at, options).map_err(wrong)?;
    let mut exits = Vec::new();
    for (cause, original, label) in &builder.exits {
        exits.push(Exit { cause: *cause, original: *original, resume: done.label_ip(label).map_err(wrong)? });
    }
    Ok(Thunk { code: done.inner.code_buffer, exits })
}

/// Returns the instruction for a read of CR2, at each fault. CR2 is in the block.
fn read_of_block(instruction: &Instruction) -> Option<Instruction> {
    if instruction.op_count() != 2 || instruction.op1_register() != Register::CR2 {
        return None;
    }
    let place = MemoryOperand::with_displ(at::CR2, 8);
    Instruction::with2(Code::Mov_r64_rm64, instruction.op0_register(), place).ok()
}

/// Returns true for a read of the selector of ES, DS, FS or GS.
fn is_of_data(instruction: &Instruction) -> bool {
    let from =
        if instruction.op_count() == 1 { instruction.op0_register() } else { instruction.op1_register() };
    selectors::REGISTERS.contains(&from)
}

impl Builder<'_> {
    fn all(&mut self) -> std::result::Result<(), iced_x86::IcedError> {
        let end = self.slot.address + self.slot.bytes.len() as u64;
        let instructions: Vec<Instruction> =
            Decoder::with_ip(64, self.slot.bytes, self.slot.address, DecoderOptions::NONE).iter().collect();
        let mut flows = true;
        let mut at = 0;
        while at < instructions.len() && flows {
            let instruction = &instructions[at];
            at += 1;
            let kind = self.sensitive(instruction);
            let halts = kind == Some(Kind::Sti)
                && instructions.get(at).is_some_and(|next| self.sensitive(next) == Some(Kind::Hlt));
            flows = match kind {
                // Nothing may come between: HLT looks for what waits.
                Some(Kind::Sti) if halts => self.interrupts_on_only(),
                Some(Kind::Clac | Kind::Stac) => Ok(true),
                // The CPU has the guest's selectors.
                Some(Kind::StoreSegment) if is_of_data(instruction) => self.copy(instruction, end),
                Some(kind) if !may_be_executed(kind) => self.emulate(kind, instruction),
                _ => self.copy(instruction, end),
            }?;
        }
        if flows {
            self.assembler.jmp(end)?;
        } else if self.exits.last().is_some() {
            // A label needs an instruction after it.
            self.assembler.ud2()?;
        }
        Ok(())
    }

    fn sensitive(&self, instruction: &Instruction) -> Option<Kind> {
        let offset = instruction.ip() - self.slot.address;
        self.slot.records.iter().find(|record| u64::from(record.offset) == offset).map(|record| record.kind)
    }

    /// Copies a borrowed instruction. Returns true if the next one is reached.
    fn copy(
        &mut self,
        instruction: &Instruction,
        end: u64,
    ) -> std::result::Result<bool, iced_x86::IcedError> {
        match instruction.flow_control() {
            FlowControl::Call => {
                self.assembler.push(end as i32)?;
                self.assembler.jmp(instruction.near_branch_target())?;
                Ok(false)
            }
            FlowControl::IndirectCall => {
                // The return address is pushed before the target is read, which RSP must not be part of.
                let mut jump = *instruction;
                // Of another form there is none in 64-bit code; the encoder refuses it.
                if instruction.code() == Code::Call_rm64 {
                    jump.set_code(Code::Jmp_rm64);
                }
                self.assembler.push(end as i32)?;
                self.assembler.add_instruction(jump)?;
                Ok(false)
            }
            FlowControl::UnconditionalBranch | FlowControl::IndirectBranch | FlowControl::Return => {
                self.assembler.add_instruction(*instruction)?;
                Ok(false)
            }
            _ => {
                self.assembler.add_instruction(*instruction)?;
                Ok(true)
            }
        }
    }

    fn interrupts_on_only(&mut self) -> std::result::Result<bool, iced_x86::IcedError> {
        self.assembler.mov(byte_ptr(at::IF_BYTE), 2)?;
        Ok(true)
    }

    fn emulate(
        &mut self,
        kind: Kind,
        instruction: &Instruction,
    ) -> std::result::Result<bool, iced_x86::IcedError> {
        let is_quad = matches!(instruction.code(), Code::Pushfq | Code::Popfq);
        match kind {
            Kind::Cli => self.assembler.mov(byte_ptr(at::IF_BYTE), 0)?,
            Kind::Sti => self.interrupts_on()?,
            Kind::Pushf if is_quad => self.assembler.push(qword_ptr(at::FLAGS))?,
            Kind::Popf if is_quad => self.flags_from_stack()?,
            Kind::Swapgs => self.exchange_bases()?,
            Kind::Sysret if instruction.code() == Code::Sysretq => {
                self.assembler.jmp(qword_ptr(at::SYSTEM_RETURN))?;
            }
            _ => match read_of_block(instruction) {
                Some(read) => self.assembler.add_instruction(read)?,
                None => self.leave(Cause::Sensitive(*instruction), instruction.ip())?,
            },
        }
        Ok(!kind.ends_flow())
    }

    /// Emits STI and the check for waiting interrupts. The flags stay as they are.
    fn interrupts_on(&mut self) -> std::result::Result<(), iced_x86::IcedError> {
        let mut quiet = self.assembler.create_label();
        self.assembler.mov(byte_ptr(at::IF_BYTE), 2)?;
        self.assembler.pushfq()?;
        self.assembler.cmp(byte_ptr(at::PENDING), 0)?;
        self.assembler.je(quiet)?;
        self.leave(Cause::Pending, 0)?;
        self.assembler.set_label(&mut quiet)?;
        self.assembler.popfq()
    }

    /// Emits POPF. The kernel's interrupt flag is bit 1 of the second byte. The processor ignores
    /// it in a process.
    fn flags_from_stack(&mut self) -> std::result::Result<(), iced_x86::IcedError> {
        let (mut on, mut done) = (self.assembler.create_label(), self.assembler.create_label());
        self.assembler.test(byte_ptr(rsp + 1), 2)?;
        self.assembler.jne(on)?;
        self.assembler.mov(byte_ptr(at::IF_BYTE), 0)?;
        self.assembler.jmp(done)?;
        self.assembler.set_label(&mut on)?;
        self.assembler.mov(byte_ptr(at::IF_BYTE), 2)?;
        self.assembler.cmp(byte_ptr(at::PENDING), 0)?;
        self.assembler.je(done)?;
        self.leave(Cause::Pending, 0)?;
        self.assembler.set_label(&mut done)?;
        self.assembler.popfq()
    }

    /// Emits SWAPGS. Kernels use it with interrupts off, so nothing else uses the scratch register.
    fn exchange_bases(&mut self) -> std::result::Result<(), iced_x86::IcedError> {
        self.assembler.mov(qword_ptr(at::SCRATCH), rax)?;
        self.assembler.rdgsbase(rax)?;
        self.assembler.xchg(qword_ptr(at::GS_OTHER), rax)?;
        self.assembler.wrgsbase(rax)?;
        self.assembler.mov(rax, qword_ptr(at::SCRATCH))
    }

    fn leave(&mut self, cause: Cause, original: u64) -> std::result::Result<(), iced_x86::IcedError> {
        let mut behind = self.assembler.create_label();
        self.assembler.mov(dword_ptr(at::EXIT), (self.first + self.exits.len()) as i32)?;
        self.assembler.jmp(qword_ptr(at::ENTRY))?;
        self.assembler.set_label(&mut behind)?;
        // A label names an instruction, which another label may have to name too.
        self.assembler.nop()?;
        self.exits.push((cause, original, behind));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mercury_afterburner::operand::Operand;

    const PLACE: u64 = 0x4100_0000;
    const AT: u64 = crate::layout::THUNKS;
    const HOLE: Range<u64> = AT..AT + 0x1000_0000;

    fn record(kind: Kind, offset: u8, size: u8, length: u8) -> Record {
        let operands = [Operand::NONE; 2];
        Record { slot: PLACE, length, offset, size, kind, flags: Flags::default(), operands }
    }

    fn text(code: &[u8]) -> Vec<Instruction> {
        Decoder::with_ip(64, code, AT, DecoderOptions::NONE).iter().collect()
    }

    #[test]
    fn an_alternative_that_shows_the_host_is_told() {
        let alternative = |kind| Record { flags: Flags::ALTERNATIVE, ..record(kind, 0, 1, 5) };
        for kind in [Kind::Pushf, Kind::Popf, Kind::Iret, Kind::Cpuid] {
            assert!(
                !may_be_put_elsewhere(&alternative(kind)) && may_be_put_elsewhere(&record(kind, 0, 1, 5))
            );
        }
        // These trap, or mean the same.
        for kind in [Kind::Cli, Kind::Sti, Kind::Wrmsr, Kind::Clac, Kind::Xrstors] {
            assert!(may_be_put_elsewhere(&alternative(kind)));
        }
    }

    /// Looks for free addresses as the kernel does, with the code for that executed.
    fn find_free(hole: &Range<u64>, upwards: bool, length: u64, limits: Range<u64>) -> u64 {
        use iced_x86::code_asm::rdi;
        let mut function = CodeAssembler::new(64).unwrap();
        let mut none = function.create_label();
        // All is free: the end of it, if there is so much.
        function.mov(rax, qword_ptr(rdi + HIGH_LIMIT)).unwrap();
        function.sub(rax, qword_ptr(rdi + 8)).unwrap();
        function.jb(none).unwrap();
        function.cmp(rax, qword_ptr(rdi + LOW_LIMIT)).unwrap();
        function.jb(none).unwrap();
        function.ret().unwrap();
        function.set_label(&mut none).unwrap();
        function.mov(rax, i64::from(-libc::ENOMEM)).unwrap();
        function.ret().unwrap();
        let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: A new mapping where the host likes.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), 4096, rights, how, -1, 0) };
        assert_ne!(place, libc::MAP_FAILED);
        let at = place as u64;
        let code = function.assemble(at).unwrap();
        let (thunk, displaced) = search_beside(hole, &code, at, at + 2048).unwrap().unwrap();
        assert!((HOOK_LENGTH..code.len()).contains(&displaced) && thunk.code.len() < 2048);
        let info = [u64::from(!upwards), length, limits.start, limits.end];
        // SAFETY: The code was made for these addresses, fits, and follows the conventions of functions in C.
        let found = unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), place.cast(), code.len());
            std::ptr::copy_nonoverlapping(
                thunk.code.as_ptr(),
                place.cast::<u8>().add(2048),
                thunk.code.len(),
            );
            let look: extern "C" fn(*const u64) -> u64 = std::mem::transmute(place.cast::<u8>().add(2048));
            let found = look(info.as_ptr());
            libc::munmap(place, 4096);
            found
        };
        assert_eq!(info, [u64::from(!upwards), length, limits.start, limits.end]);
        found
    }

    #[test]
    fn free_addresses_are_looked_for_beside_the_hole() {
        const NONE: u64 = (-(libc::ENOMEM as i64)).cast_unsigned();
        let hole = 0x3800_0000..0x1_0000_0000;
        let both = 0x1_0000..0x5000_0000_0000;
        assert_eq!(find_free(&hole, false, 0x1000, both.clone()), both.end - 0x1000);
        assert_eq!(find_free(&hole, true, 0x1000, both.clone()), hole.start - 0x1000);
        // The length fits on one side only, so the order does not matter.
        assert_eq!(find_free(&hole, true, 0x4000_0000, both.clone()), both.end - 0x4000_0000);
        assert_eq!(find_free(&hole, false, 0x2000, 0x1_0000..hole.end + 0x1000), hole.start - 0x2000);
        assert_eq!(find_free(&hole, false, 0x4000_0000, 0x1_0000..hole.end + 0x1000), NONE);
        // As MAP_32BIT: nothing, or what is left of it; and limits that the hole is not between.
        for upwards in [false, true] {
            assert_eq!(find_free(&hole, upwards, 0x1000, 0x4000_0000..0x8000_0000), NONE);
            assert_eq!(
                find_free(&(0x3800_0000..0x5000_0000), upwards, 0x1000, 0x4000_0000..0x8000_0000),
                0x7FFF_F000
            );
            assert_eq!(find_free(&hole, upwards, 0x1000, 0x1_0000..hole.start), hole.start - 0x1000);
            assert_eq!(find_free(&hole, upwards, 0x1000, hole.end..both.end), both.end - 0x1000);
        }
    }

    #[test]
    fn free_addresses_are_given_without_leaving_the_guest() {
        // push %rbp ; mov %rsi,%r9 ; push %rbx ; mov %rdx,%rbx
        let code = [0x55, 0x49, 0x89, 0xF1, 0x53, 0x48, 0x89, 0xD3];
        let jumps = |what| {
            let (thunk, _) = hook(what, &code, PLACE, AT, 7, &HOLE).unwrap().unwrap();
            text(&thunk.code).iter().filter(|one| one.is_jcc_short_or_near()).count()
        };
        assert_eq!(
            (jumps(Use::Give(Giving::Find)), jumps(Use::Give(Giving::Grow)), jumps(Use::Copy)),
            (3, 0, 0)
        );
    }

    #[test]
    fn a_function_leaves_first_and_can_go_on() {
        // nop ; nop ; nop ; cmp $8,%edx ; jb
        let code = [0x90, 0x90, 0x90, 0x83, 0xFA, 8, 0x72, 0x27];
        let (thunk, length) = hook(Use::Copy, &code, PLACE, AT, 7, &HOLE).unwrap().unwrap();
        assert_eq!((length, thunk.exits.len()), (6, 1));
        let behind = (thunk.exits[0].resume - AT) as usize;
        assert_eq!(thunk.code[behind + 1..behind + 7], code[..6]);
        let jump =
            Decoder::with_ip(64, &thunk.code[behind + 7..], AT + behind as u64 + 7, DecoderOptions::NONE)
                .decode();
        assert_eq!(jump.near_branch_target(), PLACE + 6);
        // What would lead elsewhere, or look elsewhere, is left alone.
        for code in [&[0x90, 0x72, 0x27, 0x90, 0x90][..], &[0x48, 0x8B, 0x05, 0, 0, 0, 0]] {
            assert!(hook(Use::Copy, code, PLACE, AT, 7, &HOLE).unwrap().is_none());
        }
    }

    #[test]
    fn a_guarded_instruction_leaves_first_and_is_executed_with_those_behind_it() {
        // mov %rdx,(%rax) ; add $8,%rax
        let code = [0x48, 0x89, 0x10, 0x48, 0x83, 0xC0, 8];
        let displaced: Vec<Instruction> =
            Decoder::with_ip(64, &code, PLACE, DecoderOptions::NONE).iter().collect();
        let (thunk, places) = access(&displaced, AT, 7).unwrap();
        let made = text(&thunk.code);
        assert_eq!((made[0].immediate32(), made[0].len() as u64), (7, NAMING_LENGTH));
        assert_eq!((made[1].ip(), thunk.exits[0].original), (thunk.exits[0].jump(), PLACE));
        assert_eq!(places, [made[2].ip(), made[3].ip()]);
        assert_eq!(thunk.code[(places[0] - AT) as usize..][..code.len()], code);
        assert_eq!(made[4].near_branch_target(), PLACE + code.len() as u64);
    }

    #[test]
    fn borrowed_instructions_are_executed_before_the_guest_goes_on() {
        // cli ; movl $1,%eax
        let bytes = [0xFA, 0xB8, 1, 0, 0, 0];
        let records = [record(Kind::Cli, 0, 1, 6)];
        let thunk = build(&Slot { address: PLACE, bytes: &bytes, records: &records }, AT, 0).unwrap();
        assert!(thunk.exits.is_empty());
        let code = text(&thunk.code);
        assert_eq!(code[0].memory_displacement64(), at::IF_BYTE);
        assert_eq!(code[1].immediate32(), 1);
        assert_eq!(code[2].near_branch_target(), PLACE + 6);
    }

    #[test]
    fn cr2_and_selectors_are_read_without_an_exit() {
        let made = |kind: Kind, bytes: &[u8]| {
            let records = [record(kind, 0, bytes.len() as u8, bytes.len() as u8)];
            let thunk = build(&Slot { address: PLACE, bytes, records: &records }, AT, 0).unwrap();
            (thunk.exits.len(), text(&thunk.code)[0])
        };
        // mov %cr2,%r13
        let (exits, first) = made(Kind::ReadControl, &[0x41, 0x0F, 0x20, 0xD5]);
        assert_eq!((exits, first.memory_displacement64(), first.op0_register()), (0, at::CR2, Register::R13));
        // mov %ds,%eax ; mov %fs,%r9 ; mov %gs,%ax ; mov %ds,(%rdi) ; push %fs
        for bytes in
            [&[0x8C, 0xD8][..], &[0x49, 0x8C, 0xE1], &[0x66, 0x8C, 0xE8], &[0x8C, 0x1F], &[0x0F, 0xA0]]
        {
            let (exits, first) = made(Kind::StoreSegment, bytes);
            assert_eq!((exits, first), (0, text(bytes)[0]));
        }
        // mov %cr3,%rax ; mov %ss,%eax ; mov %cs,%eax
        for (kind, bytes) in [
            (Kind::ReadControl, &[0x0F, 0x20, 0xD8][..]),
            (Kind::StoreSegment, &[0x8C, 0xD0]),
            (Kind::StoreSegment, &[0x8C, 0xC8]),
        ] {
            assert_eq!(made(kind, bytes).0, 1);
        }
    }

    #[test]
    fn exits_are_where_they_say() {
        // out %al,%dx ; mov (%rip+0x10),%eax
        let bytes = [0xEE, 0x8B, 0x05, 0x10, 0, 0, 0];
        let records = [record(Kind::Out, 0, 1, 7)];
        let thunk = build(&Slot { address: PLACE, bytes: &bytes, records: &records }, AT, 5).unwrap();
        let code = text(&thunk.code);
        let exit = thunk.exits[0];
        assert_eq!((exit.original, code[0].immediate32(), code[0].len() as u64), (PLACE, 5, NAMING_LENGTH));
        assert_eq!((code[1].ip(), code[1].next_ip()), (exit.jump(), exit.resume));
        assert_eq!(code[1].memory_displacement64(), at::ENTRY);
        // Relative to itself it would address something else there.
        assert!(
            code.iter()
                .any(|one| one.is_ip_rel_memory_operand() && one.ip_rel_memory_address() == PLACE + 7 + 0x10)
        );
    }

    #[test]
    fn a_call_returns_behind_the_slot() {
        // cli ; call +0x100
        let bytes = [0xFA, 0xE8, 0, 1, 0, 0];
        let records = [record(Kind::Cli, 0, 1, 6)];
        let thunk = build(&Slot { address: PLACE, bytes: &bytes, records: &records }, AT, 0).unwrap();
        let code = text(&thunk.code);
        assert_eq!(code[1].immediate32to64().cast_unsigned(), PLACE + 6);
        assert_eq!(code[2].near_branch_target(), PLACE + 6 + 0x100);
        assert_eq!(code.len(), 3);
    }

    #[test]
    fn a_site_executes_what_it_displaced_and_touches_no_stack_and_no_flags() {
        // mov $39,%eax
        let bytes = [0xB8, 39, 0, 0, 0];
        let code = text(&site(&bytes, 0x3FEB_0008, 0x207, AT, AT + 0x1000).unwrap());
        assert_eq!(code[0].immediate32(), 39);
        assert_eq!((code[1].memory_displacement64(), code[1].immediate8()), (at::IF_BYTE, 0));
        assert_eq!(code[2].memory_displacement64(), 0x3FEB_0008);
        assert_eq!((code[3].mnemonic(), code[3].memory_displacement64()), (iced_x86::Mnemonic::Lea, 0x207));
        assert_eq!(code[4].near_branch_target(), AT + 0x1000);
        assert!(code.iter().all(|one| one.rflags_modified() == 0 && one.stack_pointer_increment() == 0));
    }

    #[test]
    fn a_return_past_the_check_can_be_finished() {
        let (gates, code) = gates(AT, 7).unwrap();
        let code = text(&code);
        let at = |ip: u64| code.iter().position(|one| one.ip() == ip).unwrap();
        let (looked, end) = (at(gates.returning[0]), at(gates.returning[1]));
        assert_eq!(looked, at(gates.system_return) + 1);
        // The code stores the stack pointer first. Its last instruction is the jump to the program,
        // after the change of the interrupt flag.
        assert_eq!(code[looked - 1].memory_displacement64(), at::SCRATCH);
        assert_eq!(code[end - 1].mnemonic(), iced_x86::Mnemonic::Jmp);
        assert_eq!(code[end - 2].memory_displacement64(), at::IF_BYTE);
        assert!(code[looked..end].iter().any(|one| one.memory_displacement64() == at::PENDING));
        assert!(
            code[end..].iter().any(|one| one.memory_displacement64() == at::EXIT && one.immediate32() == 7)
        );
    }

    #[test]
    fn instructions_that_a_process_may_execute_are_left() {
        assert!(!is_filled(&[record(Kind::Stac, 0, 3, 3)]));
        assert!(is_filled(&[record(Kind::Swapgs, 0, 3, 8), record(Kind::ReadBase, 3, 5, 8)]));
        let mut alternative = record(Kind::Cli, 0, 1, 5);
        alternative.flags = Flags::ALTERNATIVE;
        assert!(!is_filled(&[alternative]));
    }
}
