//! Signals of the host: the guest's faults and system calls, and those that say that a device has something.

use std::{
    ffi::c_void,
    ptr,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use crate::{
    block,
    devices::console,
    entry,
    error::{Error, Result},
    isolation, layout,
    machine::{self, End, Exception, Machine, Turn},
    mmu::Privilege,
    smp,
};

/// Room for registers of any length.
const STACK: usize = 512 << 10;
/// Numbers of x86's exceptions, as the host's kernel gives them with a signal.
mod trap {
    pub const DIVISION: i64 = 0;
    pub const BREAKPOINT: i64 = 3;
    pub const UNDEFINED: i64 = 6;
    pub const PROTECTION: i64 = 13;
    pub const PAGE: i64 = 14;
}
/// What a signal says that the guest has done.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// A program's system call; the rest means nothing then.
    pub is_call: bool,
    /// The exception's number.
    pub number: i64,
    /// Its error code.
    pub error: u32,
    /// The address that a page fault is about.
    pub address: u64,
}

/// Of the structure that a signal's handler gets, in the order of the block's.
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

/// Somebody wants the machine's end.
static END: AtomicBool = AtomicBool::new(false);

/// The most processes that one has made: those of other processors, or for programs.
const MOST_CHILDREN: usize = 64;
/// Their numbers. This process may have other children: of the program that became it, or whose parents have ended, if it is
/// a container's first.
static CHILDREN: [AtomicI32; MOST_CHILDREN] = [const { AtomicI32::new(0) }; MOST_CHILDREN];

/// The machine ends with this process.
pub fn watch_child(pid: i32) {
    let free =
        |child: &&AtomicI32| child.compare_exchange(0, pid, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    let found = CHILDREN.iter().find(free);
    debug_assert!(found.is_some());
}

/// In a new process: those were its parent's.
pub fn forget_children() {
    CHILDREN.iter().for_each(|child| child.store(0, Ordering::SeqCst));
}

/// Whether one of them has ended. One signal may tell of several children.
fn has_child_ended() -> bool {
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

/// A process of ours has ended.
static CHILD_GONE: AtomicBool = AtomicBool::new(false);
/// Its status, as the host says it.
static CHILD_STATUS: AtomicI32 = AtomicI32::new(0);
/// What the machine says then. Somebody has killed it, or the host has.
pub const CHILD_HAS_ENDED: &str = "a process has ended that a processor or the guest's programs run in";

/// The same, with how it has ended. Its signal may still be on the way to this process.
#[must_use]
pub fn how_child_has_ended() -> String {
    has_child_ended();
    let status = CHILD_STATUS.load(Ordering::Acquire);
    let how = match (libc::WIFSIGNALED(status), libc::WTERMSIG(status)) {
        (true, libc::SIGSYS) => ": by the host, for a system call that is forbidden".to_owned(),
        (true, signal) => format!(": by signal {signal}"),
        (false, _) => String::new(),
    };
    format!("{CHILD_HAS_ENDED}{how}")
}

/// Whether a process has ended that a processor or the guest's programs run in.
#[must_use]
pub fn is_child_gone() -> bool {
    CHILD_GONE.load(Ordering::Acquire)
}

/// Whether a signal has asked for the machine's end.
#[must_use]
pub fn is_end_wanted() -> bool {
    END.load(Ordering::Acquire)
}

/// As the kernel wants it; the library's function insists on its own way back.
#[repr(C)]
pub(crate) struct Action {
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

/// Makes the guest's faults and system calls ours.
///
/// # Errors
/// If the host refuses.
pub fn install() -> Result<()> {
    let stack = Box::leak(vec![0_u8; STACK].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
    // SAFETY: The stack is never freed.
    if unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) } != 0 {
        return Err(Error::system("set the stack for signals"));
    }
    const RESTORER: u64 = 0x0400_0000;
    let action = Action {
        handler: entry::hosted_signal as *const () as u64,
        flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NOCLDSTOP) as u64 | RESTORER,
        restorer: entry::hosted_restorer as *const () as u64,
        mask: !0,
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
        smp::CALL,
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGCHLD,
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

/// A file that may not grow any more (`ulimit -f`) is an error like others, and not this process' end.
pub fn ignore_file_size() {
    // SAFETY: There is no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Makes system calls signals while the selector says so.
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
        .hint("the host's kernel has to be 5.11 or later"))
}

/// Called by the handler in assembler. Says whether it was the guest that was interrupted: then its bases of FS and GS are
/// in the block.
///
/// # Safety
/// The arguments are those of a signal's handler, and the base of FS before it.
pub unsafe extern "C" fn handle_signal(
    signal: i32,
    _: *const libc::siginfo_t,
    context: *mut libc::ucontext_t,
    fs: u64,
) -> u32 {
    // SAFETY: The kernel has put it on the stack for us.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let rip = registers[libc::REG_RIP as usize].cast_unsigned();
    let is_end = matches!(signal, libc::SIGTERM | libc::SIGINT | libc::SIGHUP);
    let is_notice = is_end || matches!(signal, libc::SIGALRM | libc::SIGUSR1 | smp::CALL | libc::SIGCHLD);
    if signal == libc::SIGCHLD && has_child_ended() {
        CHILD_GONE.store(true, Ordering::Release);
    }
    if is_end {
        END.store(true, Ordering::Release);
    }
    // Whether the guest takes interrupts or not: it may wait for ever, without them, for a processor that has ended.
    let is_urgent = is_end || matches!(signal, smp::CALL | libc::SIGCHLD);
    if is_urgent {
        smp::called().store(1, Ordering::SeqCst);
    }
    if is_notice {
        machine::pending().store(1, Ordering::SeqCst);
        isolation::stub::interrupt();
        if let Some(home) = machine::home() {
            home.interrupt(is_urgent);
        }
    }
    if !layout::is_guest_code(rip) {
        if !is_notice {
            die(signal, registers);
        }
        let start = entry::hosted_resume_start as *const () as u64;
        let end = entry::hosted_resume_end as *const () as u64;
        if (start..end).contains(&rip) {
            registers[libc::REG_RIP as usize] =
                (entry::hosted_resume_pending as *const () as u64).cast_signed();
        }
        return 0;
    }
    let Some(mut turn) = Turn::take() else { die(signal, registers) };
    let machine = &mut *turn;
    take(machine, registers, fs);
    match is_notice {
        true => {
            machine.finish_return();
            if machine.is_debugger_wanted() {
                machine.begin_exit_again();
                machine.attend_debugger();
            }
            if is_urgent {
                machine.attend();
            }
            if machine.interruptible() {
                machine.begin_exit_again();
                machine.service();
            }
        }
        false => answer(machine, Fault::new(signal, registers)),
    }
    give(machine, registers);
    if machine.is_program_elsewhere() || machine.home.is_some_and(|home| home.is_left()) {
        registers[libc::REG_RIP as usize] = (entry::hosted_enter_program as *const () as u64).cast_signed();
        return 0;
    }
    1
}

fn take(machine: &Machine, from: &[libc::greg_t; 23], fs: u64) {
    let block = machine.block();
    for (to, index) in block.registers.general.iter().zip(ORDER) {
        to.set(from[index as usize].cast_unsigned());
    }
    block.registers.rip.set(from[libc::REG_RIP as usize].cast_unsigned());
    block.registers.rflags.set(from[libc::REG_EFL as usize].cast_unsigned());
    block.fs.set(fs);
    let base: u64;
    // SAFETY: The start requires that processes may read it.
    unsafe { std::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    block.gs.set(base);
}

fn give(machine: &Machine, to: &mut [libc::greg_t; 23]) {
    let block = machine.block();
    for (from, index) in block.registers.general.iter().zip(ORDER) {
        to[index as usize] = from.get().cast_signed();
    }
    to[libc::REG_RIP as usize] = block.registers.rip.get().cast_signed();
    to[libc::REG_EFL as usize] = block.registers.rflags.get().cast_signed();
}

impl Fault {
    fn new(signal: i32, registers: &[libc::greg_t; 23]) -> Self {
        Self {
            is_call: signal == libc::SIGSYS,
            number: registers[libc::REG_TRAPNO as usize],
            error: registers[libc::REG_ERR as usize] as u32,
            address: registers[libc::REG_CR2 as usize].cast_unsigned(),
        }
    }
}

/// Does what the guest has asked for, or gives it what the processor would.
pub fn answer(machine: &mut Machine, fault: Fault) {
    if fault.is_call {
        return machine.system_call();
    }
    machine.leave_stand_in();
    let error = fault.error;
    let simple = |vector| Exception { vector, error: None, address: None };
    match fault.number {
        trap::PAGE => machine.page_fault(fault.address, error.into()),
        trap::PROTECTION if machine.privilege() == Privilege::Kernel && machine.trapped().is_some() => {}
        trap::PROTECTION => machine.inject(Exception { error: Some(error), ..Exception::PROTECTION }),
        trap::UNDEFINED if machine.resume_below_a_jump() => {}
        trap::UNDEFINED => machine.inject(Exception::UNDEFINED),
        trap::BREAKPOINT
            if machine.privilege() == Privilege::Kernel && (machine.breakpoint() || machine.guarded()) => {}
        number @ (trap::DIVISION | 1 | trap::BREAKPOINT | 4 | 5 | 16 | 19) => {
            machine.inject(simple(number as u8))
        }
        number @ (12 | 17) => machine.inject(Exception { error: Some(error), ..simple(number as u8) }),
        // Its process may report what it likes.
        _ if machine.is_program_elsewhere() => machine.inject(Exception::PROTECTION),
        other => machine.end(End::Broken, &format!("the host reports exception {other}")),
    }
}

/// The monitor itself has done something wrong.
fn die(signal: i32, registers: &[libc::greg_t; 23]) -> ! {
    let of = |index: i32| registers[index as usize];
    eprintln!(
        "mercury hosted: signal {signal} in the monitor at {:#x}, address {:#x}, stack {:#x}: this is a bug",
        of(libc::REG_RIP),
        of(libc::REG_CR2),
        of(libc::REG_RSP)
    );
    // The monitor was interrupted, and has the machine.
    console::restore_terminal();
    if machine::is_there() {
        eprintln!("{}", machine::describe(block::get()));
    }
    // SAFETY: It ends the process.
    unsafe { libc::_exit(machine::BROKEN_STATUS) }
}
