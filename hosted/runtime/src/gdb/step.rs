//! The successors of an instruction. A step is a breakpoint at each of them.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};

/// The guest as far as it matters.
pub trait Guest {
    /// Returns a register's value. The value of a segment is its base.
    fn register(&self, register: Register) -> u64;
    /// Returns a number in memory.
    fn long(&self, address: u64) -> Option<u64>;
}

/// Returns the addresses to which some code leads out of itself, from its start: a single
/// instruction, or the content of a slot.
#[must_use]
pub fn successors(code: &[u8], address: u64, guest: &impl Guest) -> Vec<u64> {
    let end = address + code.len() as u64;
    let mut found = Vec::new();
    // What the stack has grown by since the start.
    let mut stack = 0;
    for instruction in Decoder::with_ip(64, code, address, DecoderOptions::NONE).iter() {
        let top = guest.register(Register::RSP).wrapping_add_signed(stack);
        let flow = instruction.flow_control();
        match flow {
            // To a program: that is no step of the kernel's.
            FlowControl::Return if matches!(instruction.code(), Code::Sysretd | Code::Sysretq) => {}
            // Interrupts' return address is where a call's is.
            FlowControl::Return => found.extend(guest.long(top)),
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch | FlowControl::Call => {
                found.push(instruction.near_branch_target());
            }
            FlowControl::IndirectBranch | FlowControl::IndirectCall => {
                found.extend(target(&instruction, guest))
            }
            _ => {}
        }
        if matches!(
            flow,
            FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
        ) {
            return found;
        }
        // A call returns later, to the address after it. A step is over before.
        if matches!(flow, FlowControl::Call | FlowControl::IndirectCall) {
            return found;
        }
        stack += i64::from(instruction.stack_pointer_increment());
    }
    found.push(end);
    found
}

fn target(instruction: &Instruction, guest: &impl Guest) -> Option<u64> {
    match instruction.op0_kind() {
        OpKind::Register => Some(guest.register(instruction.op0_register())),
        OpKind::Memory => {
            let address =
                instruction.virtual_address(0, 0, |register, _, _| Some(guest.register(register)))?;
            guest.long(address)
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use iced_x86::code_asm::*;

    struct Fixed;

    impl Guest for Fixed {
        fn register(&self, register: Register) -> u64 {
            match register {
                Register::RSP => 0x7000,
                Register::RAX => 0x5000,
                Register::GS => 0x10_0000,
                _ => 0,
            }
        }

        fn long(&self, address: u64) -> Option<u64> {
            (address < 0x20_0000).then_some(address + 1)
        }
    }

    fn of(make: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u64> {
        let mut code = CodeAssembler::new(64).unwrap();
        make(&mut code).unwrap();
        successors(&code.assemble(0x1000).unwrap(), 0x1000, &Fixed)
    }

    #[test]
    fn instructions_lead_where_the_processor_goes() {
        assert_eq!(of(|code| code.mov(eax, 1)), [0x1005]);
        assert_eq!(of(|code| code.jmp(0x2000)), [0x2000]);
        assert_eq!(of(|code| code.je(0x1080)), [0x1080, 0x1002]);
        assert_eq!(of(|code| code.call(0x2000)), [0x2000]);
        assert_eq!(of(CodeAssembler::ret), [0x7001]);
        assert_eq!(of(|code| code.jmp(rax)), [0x5000]);
        assert_eq!(of(|code| code.call(qword_ptr(rax + 8))), [0x5009]);
        assert_eq!(of(|code| code.jmp(qword_ptr(0x40).gs())), [0x10_0041]);
        // The target is not known.
        assert_eq!(of(|code| code.jmp(qword_ptr(rax + 0x20_0000))), [0_u64; 0]);
    }

    #[test]
    fn slots_are_left_at_their_end_and_by_what_they_have_borrowed() {
        assert_eq!(of(|code| code.cli().and_then(|()| code.pushfq())), [0x1002]);
        assert_eq!(of(|code| code.sti().and_then(|()| code.pop(rbx)).and_then(|()| code.ret())), [0x7009]);
        assert_eq!(
            of(|code| code.cli().and_then(|()| code.jne(0x1070)).and_then(|()| code.nop())),
            [0x1070, 0x1004]
        );
        assert_eq!(of(CodeAssembler::iretq), [0x7001]);
        assert_eq!(of(CodeAssembler::sysretq), [0_u64; 0]);
    }
}
