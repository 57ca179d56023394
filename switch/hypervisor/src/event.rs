//! Events in the format that both vendors use in their control blocks: the one that the next entry
//! delivers, and the one that was in delivery when an exit struck (APM vol. 2, 15.20; SDM volume 3,
//! "VM-entry controls for event injection").

/// Valid bit: the field holds an event.
pub const VALID: u64 = 1 << 31;
/// Error-code bit: the event has an error code.
pub const HAS_ERROR_CODE: u64 = 1 << 11;
/// Type field, bits 10:8.
pub const TYPE: u64 = 7 << 8;
/// Type 0: external interrupt.
pub const EXTERNAL: u64 = 0;
/// Type 2: non-maskable interrupt.
pub const NMI: u64 = 2 << 8;
/// Type 3: exception, by its vector.
pub const EXCEPTION: u64 = 3 << 8;
/// Type 4: software interrupt.
pub const SOFTWARE: u64 = 4 << 8;
/// Event: debug exception (#DB).
pub const DEBUG: u64 = VALID | EXCEPTION | 1;
/// Event: invalid opcode (#UD).
pub const INVALID_OPCODE: u64 = VALID | EXCEPTION | 6;
/// Event: general protection (#GP) with an error code of 0.
pub const GENERAL_PROTECTION: u64 = VALID | EXCEPTION | HAS_ERROR_CODE | 13;
/// Event: machine check (#MC).
pub const MACHINE_CHECK: u64 = VALID | EXCEPTION | 18;

/// Returns true if nothing raises a pending event again: it is any but a fault of an intercepted
/// instruction. In real mode there are no error codes.
#[must_use]
pub const fn is_lost_if_replaced(pending: u64) -> bool {
    const REAL_MODE_PROTECTION: u64 = GENERAL_PROTECTION & !HAS_ERROR_CODE;
    pending & VALID != 0
        && !matches!(pending & !HAS_ERROR_CODE, INVALID_OPCODE | REAL_MODE_PROTECTION | MACHINE_CHECK)
}

/// Returns true if the instruction raises an event again that was in its delivery: the event is an
/// exception other than #DB, whose instruction is done.
#[must_use]
pub const fn is_raised_again(event: u64) -> bool {
    event & TYPE == EXCEPTION && event != DEBUG
}
