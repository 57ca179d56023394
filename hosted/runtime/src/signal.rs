//! Signals of the host: the guest's faults and system calls, and the notices of devices.

use std::{
    ffi::c_void,
    ptr,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use mercury_devices::terminal;

use crate::{
    block::{self, Segments},
    entry,
    error::{Error, Result},
    fork,
    isolation::{self, filter::X86_64},
    layout::PAGE,
    machine::{self, End, Exception, Machine, Turn, Writer},
    memory::layers::{self, own_at},
    mmu::{Access, Privilege},
    process, smp,
    vcpu::{USER_CODE, USER_STACK},
};

/// The size of the signal stack, with room for registers of any length.
const STACK: usize = 512 << 10;
/// Numbers of x86's exceptions (SDM 3A 6.15), as the host's kernel gives them with a signal.
mod trap {
    pub const DIVISION: i64 = 0;
    pub const DEBUG: i64 = 1;
    pub const BREAKPOINT: i64 = 3;
    pub const UNDEFINED: i64 = 6;
    pub const PROTECTION: i64 = 13;
    pub const PAGE: i64 = 14;
}
/// The event that a signal reports.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// True for a program's system call by SYSCALL. The other fields mean nothing then.
    pub is_call: bool,
    /// True for INT 0x80, which is a system call of the host. The other fields mean nothing then.
    pub is_interrupt: bool,
    /// The address of a call to the host's page of virtual system calls. The other fields mean nothing then.
    pub virtual_call: Option<u64>,
    /// True for a trap after a stepped instruction.
    pub is_step: bool,
    /// True if the host has no page for the address.
    pub is_without_page: bool,
    /// The exception's number.
    pub number: i64,
    pub error: u32,
    /// The address that a page fault is about.
    pub address: u64,
}

/// The vector of INT for 32-bit system calls.
const OLD_CALL: u8 = 0x80;
/// Offsets in a signal's information: the code, and a system call's address and the processor's architecture.
const CODE: usize = 8;
const CALLED_AT: usize = 16;
const ARCHITECTURE: usize = 28;
/// The code of a trap after a stepped instruction.
const TRAP_TRACE: u32 = 2;
/// The host's page of virtual system calls (vsyscall), at which the host answers calls itself.
const VIRTUAL_CALLS: std::ops::Range<u64> = 0xFFFF_FFFF_FF60_0000..0xFFFF_FFFF_FF60_1000;
/// The monitor's flags: only those that are always set.
const MONITORS_FLAGS: libc::greg_t = 0x202;

/// Indexes into the registers that a signal's handler gets, in the order of the block's.
pub const ORDER: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Set if a signal has asked for the machine's end.
static END: AtomicBool = AtomicBool::new(false);
/// Set if another program wants to write to the image of a disk in memory.
static DISK_LOST: AtomicBool = AtomicBool::new(false);
/// The message for that.
pub const DISK_HAS_CHANGED: &str = "another program opens the image of a disk for writing, or cuts it off: \
    nobody may change an image that is a part of machines' memory";
/// The codes of a signal (SIGBUS) for a page that the host does not have, and for one whose memory fails.
const NOT_THERE: u32 = 2;
const BROKEN: [u32; 2] = [4, 5];
/// The message for the latter.
const MEMORY_FAILS: &str = "the host's memory fails: a module of it may be broken";

/// Returns true if a signal says that the host has no page where one was touched.
fn is_without_page(signal: i32, code: u32) -> bool {
    signal == libc::SIGBUS && (code == NOT_THERE || BROKEN.contains(&code))
}

/// Says why the host has no page: this one of the guest's memory, or an unknown one.
fn why_without_page(code: u32, page: Option<u64>) -> &'static str {
    if BROKEN.contains(&code) { MEMORY_FAILS } else { layers::why_missing(page) }
}

/// The largest number of processes that one process makes, for other processors or for programs.
const MOST_CHILDREN: usize = 64;
/// The process numbers of these children. This process may have other children: those of the
/// program that became it, or orphans if it is a container's first process.
static CHILDREN: [AtomicI32; MOST_CHILDREN] = [const { AtomicI32::new(0) }; MOST_CHILDREN];

/// Makes the machine end when this process ends.
pub fn watch_child(pid: i32) {
    let free =
        |child: &&AtomicI32| child.compare_exchange(0, pid, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    let found = CHILDREN.iter().find(free);
    debug_assert!(found.is_some());
}

/// Forgets the children of the parent, in a new process.
pub fn forget_children() {
    // A write would give the new process a page of its own.
    let known = CHILDREN.iter().filter(|child| child.load(Ordering::SeqCst) != 0);
    known.for_each(|child| child.store(0, Ordering::SeqCst));
}

/// Returns true if one of the children has ended. One signal may report several children.
#[must_use]
pub fn has_child_ended() -> bool {
    let pids = CHILDREN.iter().map(|child| child.load(Ordering::SeqCst)).take_while(|pid| *pid != 0);
    let has_ended = |pid| {
        let mut status = 0;
        // SAFETY: There is room for the status.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if ended == pid {
            CHILD_STATUS.store(status, Ordering::Release);
        }
        ended != 0
    };
    pids.into_iter().any(has_ended)
}

/// Set if one of the children has ended.
static CHILD_GONE: AtomicBool = AtomicBool::new(false);
/// The wait status of that child.
static CHILD_STATUS: AtomicI32 = AtomicI32::new(0);
/// The message for a child that has ended. A person or the host has killed it.
pub const CHILD_HAS_ENDED: &str = "a process has ended that a processor or the guest's programs run in";

/// Returns that message with the way in which the child has ended. Its signal may still be on the
/// way to this process.
#[must_use]
pub fn how_child_has_ended() -> String {
    let _ = has_child_ended();
    let status = CHILD_STATUS.load(Ordering::Acquire);
    let how = match (libc::WIFSIGNALED(status), libc::WTERMSIG(status)) {
        (true, libc::SIGSYS) => ": by the host, for a system call that is forbidden".to_owned(),
        (true, signal) => format!(": by signal {signal}"),
        (false, _) => String::new(),
    };
    format!("{CHILD_HAS_ENDED}{how}")
}

/// Returns true if a process has ended in which a processor or the guest's programs run.
#[must_use]
pub fn is_child_gone() -> bool {
    CHILD_GONE.load(Ordering::Acquire)
}

/// Set if a template may have asked for a fork. A request may come before the signal is handled, so at first
/// it is set.
static FORK: AtomicBool = AtomicBool::new(true);

/// Returns true if a template may have asked for a fork since this function was called.
#[must_use]
pub fn may_be_forked() -> bool {
    FORK.load(Ordering::Relaxed) && FORK.swap(false, Ordering::Acquire)
}

/// Returns true if another program wants to write to the image of a disk in memory.
#[must_use]
pub fn is_disk_lost() -> bool {
    DISK_LOST.load(Ordering::Acquire)
}

/// Returns true if a signal has asked for the machine's end.
#[must_use]
pub fn is_end_wanted() -> bool {
    END.load(Ordering::Acquire)
}

/// The kernel's structure for a handler. The library's function insists on a return of its own.
#[repr(C)]
pub(crate) struct Action {
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

/// Installs the handlers that take the guest's faults and system calls.
///
/// # Errors
/// If the host refuses.
pub fn install() -> Result<()> {
    let stack = libc::stack_t { ss_sp: process::map_stack(STACK)?, ss_flags: 0, ss_size: STACK };
    // SAFETY: The stack is never freed.
    if unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) } != 0 {
        return Err(Error::system("set the stack for signals"));
    }
    const RESTORER: u64 = 0x0400_0000;
    let action = Action {
        handler: entry::hosted_signal as *const () as u64,
        flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NOCLDSTOP | libc::SA_NODEFER) as u64
            | RESTORER,
        restorer: entry::hosted_restorer as *const () as u64,
        // The handler may write to a page that is not the machine's own yet (memory::layers), and is
        // interrupted by itself then.
        mask: !(1 << (libc::SIGSEGV - 1)),
    };
    for signal in [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTRAP,
        libc::SIGSYS,
        libc::SIGALRM,
        libc::SIGUSR1,
        fork::CALL,
        smp::CALL,
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGCHLD,
        libc::SIGIO,
    ] {
        // SAFETY: The structure is the kernel's, and the handler is made for it.
        let done = unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, ptr::null_mut::<c_void>(), 8)
        };
        if done != 0 {
            return Err(Error::system("handle signals"));
        }
    }
    Ok(())
}

/// Ignores the signal for a file that has reached its limit (`ulimit -f`). The write then fails
/// with an error.
pub fn ignore_file_size() {
    // SAFETY: There is no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Makes the host turn system calls into signals while the selector says so.
///
/// # Errors
/// If the host's kernel cannot do that.
pub fn dispatch_system_calls() -> Result<()> {
    const DISPATCH: i32 = 59;
    const ON: u64 = 1;
    let start = entry::hosted_restorer as *const () as u64;
    let length = entry::hosted_restorer_end as *const () as u64 - start;
    // SAFETY: The selector is mapped beside the block, and stays; it says "allow" now.
    if unsafe { libc::prctl(DISPATCH, ON, start, length, block::at::SELECTOR) } == 0 {
        return Ok(());
    }
    Err(Error::system("have system calls dispatched (Syscall User Dispatch)")
        .hint("use a host with kernel 5.11 or later"))
}

/// Handles a signal; the handler in assembler calls it. Returns 1 if the guest was interrupted and
/// goes on. Its bases of FS and GS are in the block then.
///
/// # Safety
/// The arguments must be those of a signal's handler, the base of FS before it, and the selector's
/// value.
pub unsafe extern "C" fn handle_signal(
    signal: i32,
    information: *const libc::siginfo_t,
    context: *mut libc::ucontext_t,
    fs: u64,
    selector: u32,
) -> u32 {
    // SAFETY: The kernel has put it on the stack for us.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let rip = registers[libc::REG_RIP as usize].cast_unsigned();
    let is_end = matches!(signal, libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGIO);
    let is_notice =
        is_end || matches!(signal, libc::SIGALRM | libc::SIGUSR1 | fork::CALL | smp::CALL | libc::SIGCHLD);
    if signal == fork::CALL {
        FORK.store(true, Ordering::Release);
    }
    if signal == libc::SIGIO {
        DISK_LOST.store(true, Ordering::Release);
    }
    if signal == libc::SIGCHLD && has_child_ended() {
        CHILD_GONE.store(true, Ordering::Release);
    }
    if is_end {
        END.store(true, Ordering::Release);
    }
    // A guest that takes no interrupts may wait for ever for a processor that has ended, so such a
    // call is urgent.
    let is_urgent = is_end || matches!(signal, smp::CALL | libc::SIGCHLD);
    if is_urgent {
        smp::called().store(1, Ordering::SeqCst);
    }
    if is_notice {
        machine::pending().store(1, Ordering::SeqCst);
        isolation::stub::interrupt();
        if let Some(space) = machine::space_process() {
            space.interrupt(is_urgent);
        }
    }
    // SAFETY: The kernel has put it on the stack for us.
    let code = unsafe { information.byte_add(CODE).cast::<u32>().read() };
    let is_without_page = is_without_page(signal, code);
    // The selector is right wherever the guest's code has jumped to. Only in the code between guest
    // and monitor it changes too early or too late.
    let is_guest = selector != 0 && !is_in_transition(rip);
    if !is_guest {
        if signal == libc::SIGSEGV && own_at(registers[libc::REG_CR2 as usize].cast_unsigned()) {
            return 0;
        }
        if is_without_page {
            let page = layers::page_at(registers[libc::REG_CR2 as usize].cast_unsigned());
            end_without_page(why_without_page(code, page));
        }
        if !is_notice {
            die(signal, registers);
        }
        let start = entry::hosted_resume_start as *const () as u64;
        let end = entry::hosted_resume_end as *const () as u64;
        if (start..end).contains(&rip) {
            enter_monitor(registers, entry::hosted_resume_pending);
        }
        return 0;
    }
    let Some(mut turn) = Turn::take() else { die(signal, registers) };
    let machine = &mut *turn;
    save_registers(machine, registers, fs);
    if is_without_page {
        let address = registers[libc::REG_CR2 as usize].cast_unsigned();
        let found = machine.translate(address, Access::Read, machine.privilege());
        let page = found.ok().map(|found| found.physical / PAGE);
        machine.end(End::Broken, why_without_page(code, page));
    }
    match is_notice {
        true => {
            machine.end_step(false);
            machine.finish_return();
            if machine.is_debugger_wanted() {
                machine.restart_exit();
                machine.attend_debugger();
            }
            if is_urgent {
                machine.attend();
            }
            if machine.interruptible() {
                machine.restart_exit();
                machine.service();
            }
        }
        // SAFETY: The kernel has put it on the stack for us.
        false => answer(machine, unsafe { Fault::of_signal(signal, registers, information) }),
    }
    let goes_on_elsewhere = machine.is_program_elsewhere() || machine.is_left();
    if !goes_on_elsewhere {
        machine.catch_up_with_layers(Writer::This);
        machine.begin_step();
    }
    load_registers(machine, registers);
    if goes_on_elsewhere {
        enter_monitor(registers, entry::hosted_enter_program);
        return 0;
    }
    1
}

/// Returns true for an address in the code between guest and monitor.
fn is_in_transition(rip: u64) -> bool {
    let start = entry::hosted_exit as *const () as u64;
    let end = entry::hosted_restorer_end as *const () as u64;
    (start..end).contains(&rip)
}

/// Goes on in the monitor, with the monitor's flags and selectors: it could not work with a
/// program's.
fn enter_monitor(registers: &mut [libc::greg_t; 23], at: unsafe extern "C" fn()) {
    registers[libc::REG_RIP as usize] = (at as *const () as u64).cast_signed();
    registers[libc::REG_EFL as usize] = MONITORS_FLAGS;
    set_selectors(registers, Segments { cs: USER_CODE, ss: USER_STACK });
}

/// Returns the selectors of code and stack.
pub(crate) fn selectors(registers: &[libc::greg_t; 23]) -> Segments {
    let all = registers[libc::REG_CSGSFS as usize].cast_unsigned();
    Segments { cs: all as u16, ss: (all >> 48) as u16 }
}

/// Sets the selectors of code and stack.
pub(crate) fn set_selectors(registers: &mut [libc::greg_t; 23], segments: Segments) {
    const KEPT: u64 = 0x0000_FFFF_FFFF_0000;
    let all = registers[libc::REG_CSGSFS as usize].cast_unsigned();
    let all = all & KEPT | u64::from(segments.cs) | u64::from(segments.ss) << 48;
    registers[libc::REG_CSGSFS as usize] = all.cast_signed();
}

fn save_registers(machine: &Machine, from: &[libc::greg_t; 23], fs: u64) {
    let block = machine.block();
    for (to, index) in block.registers.general.iter().zip(ORDER) {
        to.set(from[index as usize].cast_unsigned());
    }
    block.registers.rip.set(from[libc::REG_RIP as usize].cast_unsigned());
    block.registers.rflags.set(from[libc::REG_EFL as usize].cast_unsigned());
    if machine.privilege() == Privilege::User {
        // The program may have changed to 32-bit code.
        block.segments.set(selectors(from));
    }
    block.fs.set(fs);
    let base: u64;
    // SAFETY: The start requires that processes may read it.
    unsafe { std::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    block.gs.set(base);
}

fn load_registers(machine: &Machine, to: &mut [libc::greg_t; 23]) {
    let block = machine.block();
    for (from, index) in block.registers.general.iter().zip(ORDER) {
        to[index as usize] = from.get().cast_signed();
    }
    to[libc::REG_RIP as usize] = block.registers.rip.get().cast_signed();
    to[libc::REG_EFL as usize] = block.registers.rflags.get().cast_signed();
    let programs = machine.privilege() == Privilege::User;
    let monitors = Segments { cs: USER_CODE, ss: USER_STACK };
    set_selectors(to, if programs { block.segments.get() } else { monitors });
}

impl Fault {
    /// # Safety
    /// The information must be a signal's.
    unsafe fn of_signal(
        signal: i32,
        registers: &[libc::greg_t; 23],
        information: *const libc::siginfo_t,
    ) -> Self {
        Self::new(signal, registers, |offset| {
            // SAFETY: The caller says that it is a signal's, which is longer than all offsets.
            unsafe { information.byte_add(offset).cast::<u32>().read() }
        })
    }

    /// Reads the event from a signal's registers, and from the words of its information.
    pub fn new(signal: i32, registers: &[libc::greg_t; 23], field: impl Fn(usize) -> u32) -> Self {
        let is_64_bits = field(ARCHITECTURE) == X86_64;
        let called_at = u64::from(field(CALLED_AT)) | u64::from(field(CALLED_AT + 4)) << 32;
        let is_call = signal == libc::SIGSYS;
        let is_virtual = is_call && VIRTUAL_CALLS.contains(&called_at);
        Self {
            is_call: is_call && is_64_bits && !is_virtual,
            is_interrupt: is_call && !is_64_bits,
            virtual_call: is_virtual.then_some(called_at),
            is_step: signal == libc::SIGTRAP && field(CODE) == TRAP_TRACE,
            is_without_page: is_without_page(signal, field(CODE)),
            number: registers[libc::REG_TRAPNO as usize],
            error: registers[libc::REG_ERR as usize] as u32,
            address: registers[libc::REG_CR2 as usize].cast_unsigned(),
        }
    }
}

/// Does for the guest what its processor would do at a fault or a system call.
pub fn answer(machine: &mut Machine, fault: Fault) {
    let is_step = fault.is_step && fault.number == trap::DEBUG;
    let step = machine.end_step(is_step);
    if fault.is_call {
        return machine.system_call();
    }
    if fault.is_interrupt {
        return machine.software_interrupt(OLD_CALL);
    }
    machine.return_to_replaced();
    if let Some(address) = fault.virtual_call {
        return machine.virtual_call(address);
    }
    let error = fault.error;
    let simple = |vector| Exception { vector, error: None, address: None };
    if fault.is_without_page {
        machine.touch(fault.address);
    }
    match fault.number {
        trap::PAGE => machine.page_fault(fault.address, error.into()),
        trap::PROTECTION if machine.privilege() == Privilege::Kernel && machine.trapped().is_some() => {}
        trap::PROTECTION => machine.inject(Exception { error: Some(error), ..Exception::PROTECTION }),
        trap::UNDEFINED if machine.resume_below_a_jump() => {}
        trap::UNDEFINED => machine.inject(Exception::UNDEFINED),
        trap::BREAKPOINT
            if machine.privilege() == Privilege::Kernel
                && (machine.breakpoint() || machine.user_access_trap()) => {}
        trap::DEBUG => machine.debug_trap(is_step.then_some(step)),
        number @ (trap::DIVISION | trap::BREAKPOINT | 4 | 5 | 16 | 19) => {
            machine.inject(simple(number as u8))
        }
        number @ (10..=12 | 17) => machine.inject(Exception { error: Some(error), ..simple(number as u8) }),
        // A program's fault never ends the machine.
        _ if machine.privilege() == Privilege::User => machine.inject(Exception::PROTECTION),
        other => machine.end(End::Broken, &format!("the host reports exception {other}")),
    }
}

/// Ends the process: the monitor has touched a page that the host does not have.
fn end_without_page(why: &str) -> ! {
    eprintln!("mercury hosted: {why}");
    terminal::restore();
    // SAFETY: It ends the process.
    unsafe { libc::_exit(machine::BROKEN_STATUS) }
}

/// Reports a fault of the monitor itself, and ends the process.
fn die(signal: i32, registers: &[libc::greg_t; 23]) -> ! {
    let of = |index: i32| registers[index as usize];
    eprintln!(
        "mercury hosted: signal {signal} in the monitor at {:#x}, address {:#x}, stack {:#x}: this is a bug",
        of(libc::REG_RIP),
        of(libc::REG_CR2),
        of(libc::REG_RSP)
    );
    // The monitor was interrupted, and has the machine.
    terminal::restore();
    if machine::is_there() {
        eprintln!("{}", machine::describe(block::get()));
    }
    // SAFETY: It ends the process.
    unsafe { libc::_exit(machine::BROKEN_STATUS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host has no memory for a page that a program in a process of its own touches. An answer to the
    /// fault alone would be followed by the same fault, without end.
    #[test]
    fn a_page_that_the_host_does_not_have_is_no_page_fault() {
        let mut registers = [0; 23];
        registers[libc::REG_TRAPNO as usize] = trap::PAGE;
        registers[libc::REG_CR2 as usize] = 0x7000;
        let fault = |signal: i32, code: u32| {
            let field = |offset: usize| if offset == CODE { code } else { 0 };
            Fault::new(signal, &registers, field)
        };
        assert!(!fault(libc::SIGSEGV, 1).is_without_page && !fault(libc::SIGSEGV, 2).is_without_page);
        assert!(!fault(libc::SIGBUS, 1).is_without_page, "it is the program's: alignment");
        for code in [2, 4, 5] {
            let fault = fault(libc::SIGBUS, code);
            assert!(fault.is_without_page && fault.number == trap::PAGE && fault.address == 0x7000);
        }
        assert_eq!(why_without_page(4, None), MEMORY_FAILS);
    }
}
