//! A process in which the programs of one address space run.
//!
//! The process has a page of code, memory that it shares with the monitor ([`State`] and the signal
//! stack), and the parts of the guest's memory that the monitor orders it to map. It has nothing
//! else of the host. Each event of a program that its kernel or the host must see is a signal. Its
//! handler reports and waits: the report is a system call that the host hands to the monitor (a
//! listener of seccomp). So a process that waits there has stopped, whatever its memory says. After
//! an answer the process depends only on what the monitor has written: orders, then the return from
//! the signal with the program's new registers.
//!
//! A program may write to the shared memory and jump into the code. So it can report events that
//! did not happen; the monitor takes them for the program's own. It cannot give orders
//! ([`super::filter`]). No signal comes while orders are carried out: it would leave the secret
//! readable for the program, and orders undone. The report blocks all signals.

mod spawn;

use std::{
    arch::global_asm,
    ffi::c_void,
    io,
    mem::{offset_of, size_of},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicI32, Ordering},
};

use super::filter::{self, Places};
use crate::{
    block::{Block, IF, Segments},
    error::{Error, Result},
    layout::{self, PAGE, STUB, STUB_STATE, STUB_STATE_SIZE},
    machine::VISIBLE,
    memory::create,
    selectors::{self, Selectors},
    signal::{self, Fault, ORDER},
    vcpu::{IDENTIFICATION, NESTED, PROGRAMS_OWN, USER_CODE, USER_CODE_32, USER_STACK},
};

/// The beginning of the signal stack in the shared memory.
const STACK: u64 = 0x4000;
/// A stack that counts as unused while a handler runs on it, so that each signal begins at its end.
const AUTODISARM: i32 = 1 << 31;
/// The highest address of a process.
const END: u64 = 0x7FFF_FFFF_F000;
/// Signals that come from the program, and the one by which the monitor interrupts it.
const HANDLED: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS, libc::SIGALRM];
/// The states of floating-point registers that are handed over. Protection keys are not among them,
/// because the monitor must not get them.
const STATES: u64 = 0xE7;
/// Offsets in the area of floating-point registers: the control word, the host's note, the header.
const CONTROL: usize = 24;
const CONTROL_MASK: usize = 28;
const NOTE: usize = 464;
const HEADER: usize = 512;
const HEADER_END: usize = 576;
const MAGIC: u32 = 0x4650_5853;
const MAGIC_BEHIND: u32 = 0x4650_5845;

/// A system call that the process makes for the monitor: its number and arguments.
pub type Order = [u64; 7];

/// The largest number of orders in one answer.
pub const MOST_ORDERS: usize = (STACK as usize - offset_of!(State, orders)) / size_of::<Order>();

/// The beginning of the shared memory.
#[repr(C)]
struct State {
    /// The address of the last signal's frame.
    frame: u64,
    fs: u64,
    gs: u64,
    selectors: Selectors,
    signal: u64,
    /// The flags that the return from a signal does not change.
    kept_flags: u64,
    /// 1 if an order was refused.
    failed: u64,
    /// The number of orders.
    count: u64,
    /// 1 if the process reports after the orders, 0 if it returns to the program.
    again: u64,
    secret: [u64; 2],
    /// At the start: the listener's descriptor plus one, or the negative number of an error.
    listener: i64,
    orders: [Order; 0],
}

/// The frame that a signal puts on the stack (the host's `rt_sigframe`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Frame {
    back: u64,
    flags: u64,
    link: u64,
    stack: [u64; 3],
    registers: [i64; 23],
    extended: u64,
    reserved: [u64; 8],
    mask: u64,
}

unsafe extern "C" {
    fn hosted_stub();
    fn hosted_stub_handler();
    fn hosted_stub_reported();
    fn hosted_stub_ordered();
    fn hosted_stub_returned();
    fn hosted_stub_all_signals();
    fn hosted_stub_end();
}

global_asm!(
    ".pushsection .text.hosted,\"ax\",@progbits",
    ".p2align 6",
    ".global hosted_stub",
    "hosted_stub:",
    // The first signal shows the monitor the layout of a frame.
    "int3",
    ".global hosted_stub_handler",
    "hosted_stub_handler:",
    // The host leaves the flags unchanged, except two.
    "push 2",
    "popfq",
    "rdfsbase rax",
    "mov qword ptr [{fs}], rax",
    "rdgsbase rax",
    "mov qword ptr [{gs}], rax",
    "mov word ptr [{selectors}], es",
    "mov word ptr [{selectors} + 2], ds",
    "mov word ptr [{selectors} + 4], fs",
    "mov word ptr [{selectors} + 6], gs",
    "mov qword ptr [{signal}], rdi",
    "mov qword ptr [{frame}], rsp",
    // A program may have written to this word.
    "mov qword ptr [{failed}], 0",
    "2:",
    "mov edi, {report_how}",
    "lea rsi, [rip + hosted_stub_all_signals]",
    "xor edx, edx",
    "mov r10d, {report_size}",
    "mov eax, {report}",
    "syscall",
    ".global hosted_stub_reported",
    "hosted_stub_reported:",
    // A program may have jumped to the call, so no earlier register is used from here on.
    "xor eax, eax",
    "mov r14, qword ptr [{secret}]",
    "mov r15, qword ptr [{secret} + 8]",
    "mov qword ptr [{secret}], rax",
    "mov qword ptr [{secret} + 8], rax",
    "mov ebx, {orders}",
    "mov ebp, dword ptr [{count}]",
    "3:",
    "sub ebp, 1",
    "js 4f",
    "mov rax, qword ptr [rbx]",
    "mov rdi, qword ptr [rbx + 8]",
    "mov rsi, qword ptr [rbx + 16]",
    "mov rdx, qword ptr [rbx + 24]",
    "mov r10, qword ptr [rbx + 32]",
    "or r10, r14",
    "mov r8, qword ptr [rbx + 40]",
    "or r8, r15",
    "mov r9, qword ptr [rbx + 48]",
    "syscall",
    ".global hosted_stub_ordered",
    "hosted_stub_ordered:",
    "add rbx, 56",
    "cmp rax, -4095",
    "jb 3b",
    "mov qword ptr [{failed}], 1",
    "5:",
    "xor r14d, r14d",
    "xor r15d, r15d",
    "jmp 2b",
    "4:",
    "cmp byte ptr [{again}], 0",
    "jne 5b",
    // Loads of FS and GS change the bases.
    "mov es, word ptr [{selectors}]",
    "mov ds, word ptr [{selectors} + 2]",
    "mov fs, word ptr [{selectors} + 4]",
    "mov gs, word ptr [{selectors} + 6]",
    "mov rax, qword ptr [{fs}]",
    "wrfsbase rax",
    "mov rax, qword ptr [{gs}]",
    "wrgsbase rax",
    "mov rsp, qword ptr [{frame}]",
    "add rsp, 8",
    "push qword ptr [{kept_flags}]",
    "popfq",
    "mov r10, r14",
    "mov r8, r15",
    "mov eax, 15",
    "syscall",
    ".global hosted_stub_returned",
    "hosted_stub_returned:",
    "ud2",
    ".p2align 3",
    ".global hosted_stub_all_signals",
    "hosted_stub_all_signals:",
    ".quad -1",
    ".global hosted_stub_end",
    "hosted_stub_end:",
    ".popsection",
    report = const filter::REPORT,
    report_how = const filter::REPORT_HOW,
    report_size = const filter::REPORT_SIZE,
    frame = const STUB_STATE + offset_of!(State, frame) as u64,
    fs = const STUB_STATE + offset_of!(State, fs) as u64,
    gs = const STUB_STATE + offset_of!(State, gs) as u64,
    selectors = const STUB_STATE + offset_of!(State, selectors) as u64,
    signal = const STUB_STATE + offset_of!(State, signal) as u64,
    kept_flags = const STUB_STATE + offset_of!(State, kept_flags) as u64,
    failed = const STUB_STATE + offset_of!(State, failed) as u64,
    count = const STUB_STATE + offset_of!(State, count) as u64,
    again = const STUB_STATE + offset_of!(State, again) as u64,
    secret = const STUB_STATE + offset_of!(State, secret) as u64,
    orders = const STUB_STATE + offset_of!(State, orders) as u64,
);

/// Returns the address of a symbol in the process.
fn placed(symbol: unsafe extern "C" fn()) -> u64 {
    STUB + (symbol as *const () as u64 - hosted_stub as *const () as u64)
}

/// Returns the addresses of the process's system calls.
#[must_use]
pub fn places() -> Places {
    Places {
        reported: placed(hosted_stub_reported),
        ordered: placed(hosted_stub_ordered),
        returned: placed(hosted_stub_returned),
        all_signals: placed(hosted_stub_all_signals),
    }
}

/// The descriptor of the process that runs a program now, or a negative number. Signals of the
/// monitor interrupt that process.
static RUNNING: AtomicI32 = AtomicI32::new(-1);

/// Interrupts the program that runs, if there is one. A signal handler may call this function.
pub fn interrupt() {
    let process = RUNNING.load(Ordering::SeqCst);
    if process >= 0 {
        // SAFETY: Both calls take numbers. The interrupted code may be about to read the error's
        // number, so it is restored.
        unsafe {
            let error = *libc::__errno_location();
            libc::syscall(libc::SYS_pidfd_send_signal, process, libc::SIGALRM, ptr::null::<c_void>(), 0);
            *libc::__errno_location() = error;
        }
    }
}

/// The reason for a program's stop.
#[derive(Clone, Copy, Debug)]
pub enum Stop {
    /// A system call or a fault.
    Fault(Fault),
    /// The monitor has interrupted it, or something waits.
    Interrupted,
    /// The program was found in the process's own code.
    Astray,
    /// An order was refused: the program has not run.
    Refused,
}

/// The parts that all processes share.
#[derive(Debug)]
pub struct Common {
    file: OwnedFd,
    /// The address of the shared memory in the monitor.
    window: usize,
    memory: RawFd,
    secret: [u32; 2],
}

impl Common {
    /// Makes the shared memory for so many processes, which map this file, the guest's memory.
    ///
    /// # Errors
    /// If the host refuses the memory.
    pub fn new(count: usize, memory: RawFd) -> Result<Self> {
        // SAFETY: It takes a number.
        let needed = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) };
        if needed > STUB_STATE_SIZE - STACK {
            return Err(Error::host("this processor has more registers than --isolation=process can keep"));
        }
        let size = PAGE as usize + count * STUB_STATE_SIZE as usize;
        let file = create(c"mercury-hosted-programs", 0)
            .map_err(|_| Error::system("make memory for programs' processes"))?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: The first takes a descriptor and a number; the second makes a new mapping where
        // the host likes.
        let window = unsafe {
            if libc::ftruncate(file.as_raw_fd(), size as i64) != 0 {
                return Err(Error::system("give programs' processes their memory"));
            }
            libc::mmap(ptr::null_mut(), size, rights, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if window == libc::MAP_FAILED {
            return Err(Error::system("map the memory of programs' processes"));
        }
        let mut secret = [0_u32; 2];
        // SAFETY: It is given room for eight bytes.
        if unsafe { libc::getrandom(secret.as_mut_ptr().cast(), size_of_val(&secret), 0) } != 8 {
            return Err(Error::system("get a random number"));
        }
        let code = hosted_stub as *const () as u64..hosted_stub_end as *const () as u64;
        // SAFETY: The code lies in this program, is shorter than a page, and the window begins with
        // a page for it.
        unsafe {
            ptr::copy_nonoverlapping(
                ptr::with_exposed_provenance::<u8>(code.start as usize),
                window.cast::<u8>(),
                (code.end - code.start) as usize,
            );
        }
        Ok(Self { file, window: window.expose_provenance(), memory, secret })
    }

    fn area(&self, index: usize) -> usize {
        self.window + PAGE as usize + index * STUB_STATE_SIZE as usize
    }
}

/// A process for programs.
#[derive(Debug)]
pub struct Stub {
    process: OwnedFd,
    listener: OwnedFd,
    /// The identifier of the report that waits for an answer.
    report: u64,
    /// The address of the process's shared memory in the monitor.
    area: usize,
    /// A signal's frame as the host makes it, and its address.
    frame: Frame,
    frame_at: u64,
    /// The host's note in the floating-point registers' area.
    note: [u8; HEADER - NOTE],
    /// The length of that area.
    extended: usize,
    features: u64,
    control_mask: u32,
    secret: [u64; 2],
}

impl Stub {
    /// Starts the process, and has it give up the monitor's memory and files.
    ///
    /// # Errors
    /// If the host lacks something that the process needs.
    pub fn start(common: &Common, index: usize) -> Result<Self> {
        let area = common.area(index);
        let program = filter::program(&places(), common.secret);
        let process = spawn::spawn(common, index, &program)?;
        let listener = spawn::listener(area, &process)?;
        const WAKE_HERE: u64 = 1;
        // SAFETY: It takes a number. Hosts before 6.6 do not have it, and wake wherever they like.
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, WAKE_HERE) };
        // SAFETY: All zeros are a valid frame.
        let frame = unsafe { std::mem::zeroed() };
        let mut stub = Self {
            process,
            listener,
            report: 0,
            area,
            frame,
            frame_at: 0,
            note: [0; HEADER - NOTE],
            extended: 0,
            features: 0,
            control_mask: 0,
            secret: common.secret.map(|word| u64::from(word) << 32),
        };
        stub.wait()?;
        stub.learn_frame()?;
        stub.leave_the_monitor(common)?;
        Ok(stub)
    }

    fn state(&self) -> *mut State {
        ptr::with_exposed_provenance_mut(self.area)
    }

    /// Returns the monitor's address for an address in the shared memory, if there are so many
    /// bytes.
    fn shared<T>(&self, address: u64, length: usize) -> Option<*mut T> {
        let offset = address.checked_sub(STUB_STATE)?;
        let fits = offset < STUB_STATE_SIZE && length as u64 <= STUB_STATE_SIZE - offset;
        fits.then(|| ptr::with_exposed_provenance_mut(self.area + offset as usize))
    }

    /// Reads the layout of the first signal. No program has run yet.
    fn learn_frame(&mut self) -> Result<()> {
        let strange = || Error::host("the host's signals do not look as expected (--isolation=process)");
        // SAFETY: The area is mapped for as long as the monitor lives, and the process waits.
        let state = unsafe { &*self.state() };
        self.frame_at = state.frame;
        let frame = self.shared::<Frame>(self.frame_at, size_of::<Frame>()).ok_or_else(strange)?;
        // SAFETY: It lies in the area, and any bytes are a frame.
        self.frame = unsafe { frame.read_unaligned() };
        let breakpoint = self.frame.registers[libc::REG_RIP as usize].cast_unsigned() == STUB + 1;
        let extended = self.shared::<u8>(self.frame.extended, HEADER_END).ok_or_else(strange)?;
        // SAFETY: It lies in the area.
        let word = |at: usize| unsafe { extended.add(at).cast::<u32>().read_unaligned() };
        self.extended = word(NOTE + 16) as usize;
        self.features = (u64::from(word(NOTE + 8)) | u64::from(word(NOTE + 12)) << 32) & STATES;
        self.control_mask = match word(CONTROL_MASK) {
            0 => 0xFFBF,
            mask => mask,
        };
        let known = crate::cpuid::extended_size() as usize + 64;
        let whole = self.shared::<u8>(self.frame.extended, self.extended + 4).is_some();
        if !breakpoint || word(NOTE) != MAGIC || !whole || !(HEADER_END..=known).contains(&self.extended) {
            return Err(strange());
        }
        // SAFETY: As above.
        unsafe { ptr::copy_nonoverlapping(extended.add(NOTE), self.note.as_mut_ptr(), HEADER - NOTE) };
        self.frame.mask &= !HANDLED.iter().fold(0, |mask, signal| mask | 1 << (signal - 1));
        Ok(())
    }

    /// Has the process close and unmap everything that is not its own.
    fn leave_the_monitor(&mut self, common: &Common) -> Result<()> {
        let memory = common.memory as u64;
        let close = |first: u64, last: u64| {
            let unshare = u64::from(libc::CLOSE_RANGE_UNSHARE);
            [libc::SYS_close_range as u64, first, last, unshare, 0, 0, 0]
        };
        let mut orders = vec![close(memory + 1, u64::from(u32::MAX))];
        if memory > 0 {
            orders.push(close(0, memory - 1));
        }
        orders.extend(
            [(0, STUB), (STUB + PAGE, STUB_STATE), (STUB_STATE + STUB_STATE_SIZE, END)]
                .map(|(start, end)| unmap(start, end - start)),
        );
        if self.order(&orders)? {
            return Ok(());
        }
        Err(Error::host("a program's process cannot give up the monitor's memory")
            .hint("the host may seal its vDSO (MSEAL_SYSTEM_MAPPINGS): use --isolation=none there"))
    }

    /// Has orders carried out, and waits. Returns false if one was refused.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn order(&mut self, orders: &[Order]) -> Result<bool> {
        for some in orders.chunks(MOST_ORDERS) {
            self.answer(some, true)?;
            self.wait()?;
            // SAFETY: The area is mapped for as long as the monitor lives, and the process waits.
            if unsafe { (*self.state()).failed } != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Has orders carried out and the program run, from the block's registers to the block's
    /// registers. The list of orders is empty afterwards, unless the program was interrupted before
    /// it ran.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn run(&mut self, orders: &mut Vec<Order>, block: &Block) -> Result<Stop> {
        let many = orders.len() - orders.len().min(MOST_ORDERS);
        if !self.order(&orders[..many])? {
            orders.clear();
            return Ok(Stop::Refused);
        }
        orders.drain(..many);
        RUNNING.store(self.process.as_raw_fd(), Ordering::SeqCst);
        // From now on a signal interrupts the process, at once or as soon as it runs.
        if crate::machine::pending().load(Ordering::SeqCst) != 0 && block.flags.get() & IF != 0 {
            RUNNING.store(-1, Ordering::SeqCst);
            return Ok(Stop::Interrupted);
        }
        self.write_frame(block);
        let done = self.answer(orders, false).and_then(|()| self.wait());
        RUNNING.store(-1, Ordering::SeqCst);
        orders.clear();
        done?;
        Ok(self.read_frame(block))
    }

    /// Clears the shared memory of all that a program has left there.
    pub fn wipe(&mut self) {
        // SAFETY: The area is mapped for as long as the monitor lives, and the process waits; it
        // needs nothing from it but what an answer writes.
        unsafe {
            ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(self.area), 0, STUB_STATE_SIZE as usize);
        }
    }

    /// Writes the registers with which the program goes on.
    fn write_frame(&mut self, block: &Block) {
        for (from, index) in block.registers.general.iter().zip(ORDER) {
            self.frame.registers[index as usize] = from.get().cast_signed();
        }
        self.frame.registers[libc::REG_RIP as usize] = block.registers.rip.get().cast_signed();
        let flags = block.registers.rflags.get() & (VISIBLE | PROGRAMS_OWN) | 2 | IF;
        self.frame.registers[libc::REG_EFL as usize] = flags.cast_signed();
        signal::set_selectors(&mut self.frame.registers, block.segments.get());
        let extended = self.frame.extended - STUB_STATE;
        let to: *mut u8 = ptr::with_exposed_provenance_mut(self.area + extended as usize);
        let from: *const u8 = ptr::with_exposed_provenance(block.extended.get() as usize);
        let frame: *mut Frame =
            ptr::with_exposed_provenance_mut(self.area + (self.frame_at - STUB_STATE) as usize);
        // SAFETY: Both areas are as long (`learn_frame`), the frame and all offsets lie in the shared
        // memory, and the process waits.
        unsafe {
            frame.write_unaligned(self.frame);
            ptr::copy_nonoverlapping(from, to, self.extended);
            ptr::copy_nonoverlapping(self.note.as_ptr(), to.add(NOTE), HEADER - NOTE);
            let header: *mut u64 = ptr::with_exposed_provenance_mut(to.addr() + HEADER);
            header.write_unaligned(header.read_unaligned() & self.features);
            to.add(self.extended).cast::<u32>().write_unaligned(MAGIC_BEHIND);
            (*self.state()).fs = block.fs.get();
            (*self.state()).gs = block.gs.get();
            (*self.state()).selectors = selectors::read();
            (*self.state()).kept_flags = flags & (NESTED | IDENTIFICATION) | 2;
        }
    }

    /// Reads the program's registers and the reason for its stop. The program may have written all
    /// of them itself.
    fn read_frame(&mut self, block: &Block) -> Stop {
        let extended = self.frame.extended - STUB_STATE;
        let from: *const u8 = ptr::with_exposed_provenance(self.area + extended as usize);
        let to: *mut u8 = ptr::with_exposed_provenance_mut(block.extended.get() as usize);
        let frame: *const Frame =
            ptr::with_exposed_provenance(self.area + (self.frame_at - STUB_STATE) as usize);
        // SAFETY: The area is mapped for as long as the monitor lives, and the process waits.
        let (frame, state) = unsafe { (frame.read_unaligned(), &*self.state()) };
        let (signal, failed, fs, gs) = (state.signal, state.failed, state.fs, state.gs);
        let programs_selectors = state.selectors;
        if failed != 0 {
            return Stop::Refused;
        }
        for (to, index) in block.registers.general.iter().zip(ORDER) {
            to.set(frame.registers[index as usize].cast_unsigned());
        }
        block.registers.rip.set(frame.registers[libc::REG_RIP as usize].cast_unsigned());
        let flags = frame.registers[libc::REG_EFL as usize].cast_unsigned();
        block.registers.rflags.set(flags & (VISIBLE | PROGRAMS_OWN) | 2 | IF);
        let is_32_bits = signal::selectors(&frame.registers).cs == USER_CODE_32;
        let cs = if is_32_bits { USER_CODE_32 } else { USER_CODE };
        block.segments.set(Segments { cs, ss: USER_STACK });
        block.fs.set(canonical(fs));
        block.gs.set(canonical(gs));
        selectors::load(programs_selectors);
        // SAFETY: Both areas are as long (`learn_frame`). Values that the processor would refuse are
        // removed from the copy.
        unsafe {
            ptr::copy_nonoverlapping(from, to, self.extended);
            let control: *mut u32 = ptr::with_exposed_provenance_mut(to.addr() + CONTROL);
            control.write_unaligned(control.read_unaligned() & self.control_mask);
            let header: *mut u64 = ptr::with_exposed_provenance_mut(to.addr() + HEADER);
            header.write_unaligned(header.read_unaligned() & self.features);
            ptr::write_bytes(to.add(HEADER + 8), 0, HEADER_END - HEADER - 8);
        }
        if layout::is_stub(block.registers.rip.get()) {
            return Stop::Astray;
        }
        if signal == libc::SIGALRM as u64 {
            return Stop::Interrupted;
        }
        let field = |offset| self.signal_information(offset).unwrap_or_default();
        Stop::Fault(Fault::new(signal as i32, &frame.registers, field))
    }

    /// Reads the signal's information after the frame.
    fn signal_information(&self, offset: usize) -> Option<u32> {
        let at = self.shared::<u32>(self.frame_at + (size_of::<Frame>() + offset) as u64, 4);
        // SAFETY: It lies in the area, which is mapped for as long as the monitor lives.
        at.map(|at| unsafe { at.read_unaligned() })
    }

    fn answer(&mut self, orders: &[Order], again: bool) -> Result<()> {
        let state = self.state();
        // SAFETY: The area is mapped for as long as the monitor lives, there is room for so many
        // orders, and the process waits.
        unsafe {
            (*state).frame = self.frame_at;
            (*state).failed = 0;
            (*state).count = orders.len() as u64;
            (*state).again = again.into();
            (*state).secret = self.secret;
            let to = (&raw mut (*state).orders).cast::<Order>();
            ptr::copy_nonoverlapping(orders.as_ptr(), to, orders.len());
        }
        // The host goes on with the call, which blocks all signals.
        const CONTINUE: u32 = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let answer = libc::seccomp_notif_resp { id: self.report, val: 0, error: 0, flags: CONTINUE };
        // SAFETY: It reads the structure.
        let sent = unsafe {
            libc::ioctl(self.listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer)
        };
        if sent == 0 { Ok(()) } else { Err(gone()) }
    }

    /// Waits for the report.
    fn wait(&mut self) -> Result<()> {
        loop {
            // SAFETY: All zeros are what the host wants of the structure, which it then fills.
            let (done, report) = unsafe {
                let mut report: libc::seccomp_notif = std::mem::zeroed();
                let listener = self.listener.as_raw_fd();
                (libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut report), report)
            };
            if done == 0 {
                self.report = report.id;
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) if !signal::is_child_gone() => {}
                // The call was interrupted before it arrived here: a program has jumped to it, with
                // signals unblocked. The handler reports next.
                Some(libc::ENOENT) if !signal::has_child_ended() => {}
                _ => return Err(gone()),
            }
        }
    }
}

fn gone() -> Error {
    Error::host(signal::how_child_has_ended())
}

/// Makes an order to unmap a range.
#[must_use]
pub fn unmap(address: u64, length: u64) -> Order {
    [libc::SYS_munmap as u64, address, length, 0, 0, 0, 0]
}

/// Returns a base, or 0 if no instruction could set it.
fn canonical(base: u64) -> u64 {
    if base >> 47 == 0 || base >> 47 == (1 << 17) - 1 { base } else { 0 }
}
