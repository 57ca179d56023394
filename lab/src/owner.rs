//! The start of QEMU. QEMU cannot outlive this process, however this process ends.
//!
//! With `PR_SET_PDEATHSIG` the kernel kills a child when the *thread* that started the child ends.
//! One thread therefore starts all machines, and lives as long as the process.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Child, Command},
    sync::{
        Mutex, OnceLock, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

struct Order {
    command: Command,
    reply: Sender<io::Result<Child>>,
}

/// Starts a program that is killed when this process ends.
///
/// # Errors
/// If the program cannot be started.
pub fn spawn(mut command: Command) -> io::Result<Child> {
    static ORDERS: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    tie_to(getpid(), &mut command);
    let (reply, answer) = channel();
    let orders = ORDERS.get_or_init(|| Mutex::new(start_owner()));
    let gone = |_| io::Error::other("the thread that owns the machines has ended");
    let sender = orders.lock().unwrap_or_else(PoisonError::into_inner).clone();
    sender.send(Order { command, reply }).map_err(|_| io::ErrorKind::BrokenPipe)?;
    answer.recv().map_err(gone)?
}

fn start_owner() -> Sender<Order> {
    let (orders, work): (_, Receiver<Order>) = channel();
    thread::spawn(move || {
        for mut order in work {
            let _ = order.reply.send(order.command.spawn());
        }
    });
    orders
}

fn tie_to(parent: Pid, command: &mut Command) {
    let tie = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the line above. No signal would come then.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure only makes two system calls; it takes no lock and
    // allocates nothing (`ErrorKind` converts without allocating).
    unsafe { command.pre_exec(tie) };
}
