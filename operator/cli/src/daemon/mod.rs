//! `mercury daemon`, the program of the unit mercuryd: waits for the order to move this machine,
//! from its socket (`mercury evacuate`) or as SIGUSR1, and then moves it to its configured
//! destination.
//!
//! A script that foresees a failure of the machine (counters of memory errors, Slurm's
//! HealthCheckProgram) needs neither the destination nor any secret. The move itself is `mercury
//! migrate`, as a process of its own. Both processes move with the machine. The daemon that has
//! arrived reports it and waits for the next order, for which it needs another destination's
//! pairing token.

pub mod evacuate;
pub mod manager;
pub mod order;
pub mod spares;

use crate::{
    guard::{
        self,
        keeper::Keeper,
        rules::{self, Rules},
    },
    shared::ModuleArgs,
};
use clap::Args;
use libsystemd::logging::Priority;
use manager::Manager;
use mercury_abi::code::Code;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    interrupt::{self, Deferred},
    journal,
    sysroot::Sysroot,
};
use mercury_quiesce::this_process;
use order::{Answer, Desk, LINE_MAX, Order};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use spares::{Spare, Ticket};
use std::{
    collections::VecDeque,
    fs::{self, Permissions},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, TryRecvError, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// The daemon's control socket.
const SOCKET: &str = "/run/mercury/control";

#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT. Without it no order to move is
    /// accepted
    #[arg(long, env = "MERCURY_DESTINATION", value_name = "HOST")]
    pub to: Option<String>,
    /// File with the pairing token that `mercury receive` has printed there; only root may be able
    /// to read it
    #[arg(
        long,
        env = "MERCURY_KEY_FILE",
        value_name = "FILE",
        default_value = "/etc/mercury/destination.key"
    )]
    pub key_file: PathBuf,
    /// The rules of the guard (see `mercury guard`). Without this file nothing is watched
    #[arg(long, value_name = "FILE", default_value = rules::PATH)]
    pub rules: PathBuf,
    /// Control socket to create
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
    #[command(flatten)]
    pub module: ModuleArgs,
    /// Options for `mercury migrate`
    #[arg(last = true, value_name = "OPTION")]
    pub migrate: Vec<String>,
}

/// Interval at which signals and the end of a move are checked.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Time for which the driver may be busy with the end of a killed mover, and the pause between two attempts.
const DRIVER_PATIENCE: Duration = Duration::from_secs(60);
const DRIVER_PAUSE: Duration = Duration::from_millis(500);
/// Time for a client to send its line, and to read the answer.
const CLIENT: Duration = Duration::from_secs(2);

static SIGNALLED: AtomicBool = AtomicBool::new(false);

extern "C" fn remember(_: i32) {
    SIGNALLED.store(true, Ordering::Relaxed);
}

/// A function that moves this machine to a host with the right to move there. Its error says why the
/// machine is still here.
type Mover = Arc<dyn Fn(&str, &Ticket) -> Moved + Send + Sync>;
/// The outcome of a move.
type Moved = std::result::Result<(), Failure>;

/// The reason why a machine has not moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct Failure {
    #[serde(rename = "message")]
    why: String,
    /// Code of a refusal.
    #[serde(default)]
    code: Option<String>,
    /// Exit status of the mover.
    #[serde(skip)]
    exit: Option<i32>,
}

impl From<&str> for Failure {
    fn from(why: &str) -> Self {
        Self { why: why.to_owned(), ..Self::default() }
    }
}

impl Failure {
    fn is(&self, exit: Exit) -> bool {
        self.exit == Some(exit as i32)
    }

    /// Returns true if no other spare can be of help: the reason lies in this machine or its operator.
    fn ends_the_order(&self) -> bool {
        [Exit::Interrupted, Exit::State, Exit::Permission, Exit::Usage].into_iter().any(|exit| self.is(exit))
    }
}

/// Reports an action of the daemon, to the journal with fields.
fn tell(priority: Priority, text: &str, event: &str, fields: &[(&'static str, &str)]) {
    let event = [("MERCURY_EVENT", event)];
    let fields = event.iter().chain(fields).map(|(name, value)| (*name, (*value).to_owned()));
    journal::say(priority, "mercuryd", text, fields.collect());
}

/// Runs until it is told to end.
///
/// # Errors
///
/// Returns an error if another daemon runs, or the socket cannot be made.
pub fn run(args: &DaemonArgs) -> Result<Exit> {
    access::need_root("daemon")?;
    let deferred = Deferred::begin();
    this_process::stay_in_the_foreground();
    watch_for_signals();
    let options = args.migrate.clone();
    let mover: Mover = Arc::new(move |host: &str, ticket: &Ticket| {
        unless_busy(DRIVER_PATIENCE, || migrate(host, ticket, &options))
    });
    // Mistakes in the rules are refused before anything begins.
    let rules = args.rules.exists().then(|| Rules::read(&args.rules)).transpose()?;
    let spares = spares(args, rules.as_ref());
    let listener = listen(&args.socket)?;
    if rules.is_some() {
        alone(&args.socket, &Sysroot::default())?;
    }
    let keeper = rules.map(|rules| Keeper::begin(rules, args.module.module.as_deref()));
    let manager = Manager::ready();
    let mut daemon = Daemon { keeper, manager, ..Daemon::new(spares, mover) };
    tell(Priority::Info, &format!("waiting for orders at {}", args.socket.display()), "waiting", &[]);
    let ended = daemon.serve(&listener, &|| deferred.requested());
    manager::stopping();
    if let Some(keeper) = daemon.keeper.take() {
        keeper.end();
    }
    let _ = fs::remove_file(&args.socket);
    ended.map(|()| Exit::Done)
}

/// Refuses a second daemon with rules, whose socket is another one: each would undo the other's watch.
fn alone(socket: &Path, sysroot: &Sysroot) -> Result<()> {
    guard::need_no_daemon(sysroot, "another daemon").inspect_err(|_| {
        let _ = fs::remove_file(socket);
    })
}

/// Returns the spares: the daemon's own destination first, then those of the rules.
fn spares(args: &DaemonArgs, rules: Option<&Rules>) -> Vec<Spare> {
    let own = args.to.iter().map(|host| Spare::new(host, &args.key_file));
    own.chain(rules.into_iter().flat_map(|rules| rules.spares.clone())).collect()
}

/// Reports an order that is carried out.
fn report_order(to: &str, reason: &str) {
    let reason = order::printable(reason);
    let text = format!("this machine is to move to {to}: {reason}");
    tell(Priority::Notice, &text, "evacuating", &[("MERCURY_TO", to), ("MERCURY_REASON", &reason)]);
}

fn watch_for_signals() {
    // SAFETY: all zeroes is a valid sigaction; the handler only stores to an atomic, which is
    // async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = remember as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

struct Daemon {
    desk: Desk,
    /// Machines to which this one may move, in order of preference.
    spares: Vec<Spare>,
    /// Spares that the order under way has not tried yet.
    left: VecDeque<Spare>,
    mover: Mover,
    moving: Option<Receiver<Moved>>,
    keeper: Option<Keeper>,
    manager: Manager,
}

impl Daemon {
    fn new(spares: Vec<Spare>, mover: Mover) -> Self {
        let (desk, left) = (Desk::default(), VecDeque::new());
        Self { desk, spares, left, mover, moving: None, keeper: None, manager: Manager::with(None) }
    }

    fn serve(&mut self, listener: &UnixListener, wants_to_end: &dyn Fn() -> bool) -> Result<()> {
        loop {
            if wants_to_end() {
                // A mover that begins now would not get the signal, and would be killed.
                self.left.clear();
            }
            self.settle_the_move();
            self.manager.beat(self.moving.is_some(), Instant::now());
            // A machine that moves is held still by its mover.
            if self.moving.is_none()
                && !wants_to_end()
                && let Some(reason) = self.keeper.as_mut().and_then(Keeper::look)
                && self.answer(Order::Evacuate { reason }).refused.is_some()
            {
                self.keeper.iter_mut().for_each(Keeper::was_refused);
            }
            // A move ends by itself, or by the signal, which it got as well.
            if wants_to_end() && self.moving.is_none() {
                return Ok(());
            }
            if SIGNALLED.swap(false, Ordering::Relaxed) {
                self.answer(Order::Evacuate { reason: "SIGUSR1".into() });
            }
            let mut ready = [PollFd::new(listener, PollFlags::IN)];
            match poll(&mut ready, Some(&POLL_INTERVAL)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(Error::system("waiting for orders", errno)),
            }
            if let Ok((client, _)) = listener.accept()
                && let Err(error) = self.attend_to(&client)
            {
                tell(Priority::Warning, &format!("a client: {error}"), "client-failed", &[]);
            }
        }
    }

    /// Handles one order. A silent client is waited for no longer than two seconds.
    fn attend_to(&mut self, client: &UnixStream) -> io::Result<()> {
        client.set_nonblocking(false)?;
        client.set_read_timeout(Some(CLIENT))?;
        client.set_write_timeout(Some(CLIENT))?;
        let mut line = String::new();
        BufReader::new(client.take(LINE_MAX)).read_line(&mut line)?;
        let answer = match serde_json::from_str(&line) {
            Ok(order) => self.answer(order),
            Err(error) => Answer::refused(&self.desk, format!("this is not an order: {error}")),
        };
        let mut text = serde_json::to_string(&answer)?;
        text.push('\n');
        (&mut &*client).write_all(text.as_bytes())
    }

    fn answer(&mut self, order: Order) -> Answer {
        let Order::Evacuate { reason } = order else { return Answer::taken(&self.desk) };
        if self.moving.is_some() {
            // The spares that are left belong to the order under way.
            let why = "this machine is moving already";
            let reason = order::printable(&reason);
            let text = format!("not moving once more ({reason}): {why}");
            tell(Priority::Info, &text, "order-refused", &[("MERCURY_REASON", &reason)]);
            return Answer::refused(&self.desk, why.into());
        }
        self.left = self.spares.clone().into();
        match self.begin(&reason) {
            Ok(()) => Answer::taken(&self.desk),
            Err(why) => Answer::refused(&self.desk, why),
        }
    }

    /// Begins to move to the first of the spares that are left and can be used.
    fn begin(&mut self, reason: &str) -> std::result::Result<(), String> {
        let mut refusals = Vec::new();
        while let Some(spare) = self.left.pop_front() {
            let begun = spare.ticket().and_then(|ticket| {
                self.desk.begin(reason, spare.host(), &ticket)?;
                Ok(ticket)
            });
            match begun {
                Ok(ticket) => {
                    report_order(spare.host(), reason);
                    self.start(spare.host().to_owned(), ticket);
                    return Ok(());
                }
                Err(why) => {
                    let reason = order::printable(reason);
                    let text = format!("not moving to {} ({reason}): {why}", spare.host());
                    let fields = [("MERCURY_TO", spare.host()), ("MERCURY_REASON", &reason)];
                    tell(Priority::Error, &text, "order-refused", &fields);
                    refusals.push(why);
                }
            }
        }
        if refusals.is_empty() {
            let reason = order::printable(reason);
            let why = format!(
                "no destination is set: MERCURY_DESTINATION=HOST, or a [[spare]] in the rules [{}]",
                Code::NoDestination.name()
            );
            let fields = [("MERCURY_CODE", Code::NoDestination.name()), ("MERCURY_REASON", &reason)];
            tell(Priority::Error, &format!("not moving ({reason}): {why}"), "order-refused", &fields);
            return Err(why);
        }
        Err(refusals.join("; "))
    }

    fn start(&mut self, to: String, ticket: Ticket) {
        let (said, moving) = channel();
        let mover = Arc::clone(&self.mover);
        let busy = self.keeper.as_mut().and_then(Keeper::hand_over);
        // Without a thread the channel is closed, and the move has failed.
        let started = thread::Builder::new().spawn(move || {
            // A snapshot that comes too late is of no use to a machine that moves.
            let _ = busy.map(thread::JoinHandle::join);
            said.send(mover(&to, &ticket))
        });
        if let Err(error) = started {
            tell(Priority::Error, &format!("no thread for a move: {error}"), "not-moved", &[]);
        }
        self.moving = Some(moving);
    }

    fn settle_the_move(&mut self) {
        let Some(moving) = self.moving.as_ref() else { return };
        let ended = match moving.try_recv() {
            Ok(ended) => ended,
            Err(TryRecvError::Disconnected) => {
                Err("the thread that moves it has not started, or has crashed".into())
            }
            Err(TryRecvError::Empty) => return,
        };
        let (to, reason) = self.desk.under_way();
        match &ended {
            Ok(()) => {
                let text = format!("this machine has moved to {to}");
                tell(Priority::Notice, &text, "moved", &[("MERCURY_TO", &to)]);
            }
            Err(Failure { why, code, .. }) => {
                let text = format!("this machine has not moved: {why}");
                let code = code.as_deref().map(|code| ("MERCURY_CODE", code));
                let fields: Vec<_> = [("MERCURY_TO", to.as_str())].into_iter().chain(code).collect();
                tell(Priority::Error, &text, "not-moved", &fields);
            }
        }
        let has_failed = ended.is_err();
        if ended.as_ref().is_err_and(Failure::ends_the_order) {
            self.left.clear();
        }
        self.desk.end(ended.map_err(|failure| failure.why));
        self.moving = None;
        // The next spare may be better. If none can be used, the last failure stands.
        if has_failed && !self.left.is_empty() && self.begin(&reason).is_ok() {
            return;
        }
        self.keeper.iter_mut().for_each(|keeper| keeper.resume(!has_failed));
    }
}

/// Repeats a move that was refused because the driver is busy. The process that undoes a killed move holds it
/// for a while, and a next spare would be refused as well.
fn unless_busy(patience: Duration, mut moves: impl FnMut() -> Moved) -> Moved {
    let begun = Instant::now();
    loop {
        let moved = moves();
        let is_busy = moved.as_ref().is_err_and(|failure| failure.is(Exit::Busy));
        if !is_busy || begun.elapsed() >= patience || interrupt::requested() {
            return moved;
        }
        thread::sleep(DRIVER_PAUSE);
    }
}

/// Moves by `mercury migrate`, which gets a pairing token by a way that `ps` does not show.
fn migrate(host: &str, ticket: &Ticket, options: &[String]) -> Moved {
    let (way, line) = match ticket {
        Ticket::Token(line) => (["--key", "-"], line.as_str()),
        Ticket::Name(name) => (["--spare", name.as_str()], ""),
    };
    let failed =
        |error: io::Error| Failure { why: format!("mercury migrate: {error}"), ..Failure::default() };
    let mut child = Command::new(std::env::current_exe().map_err(failed)?)
        .args(["--json", "migrate", host])
        .args(way)
        .args(options.iter().filter(|option| *option != "--json"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut input) = child.stdin.take()
        && let Err(error) = input.write_all(line.as_bytes())
    {
        // Without its token it cannot have begun. A second mover must not start beside it.
        let _ = child.kill();
        let _ = child.wait();
        return Err(failed(error));
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() { Ok(()) } else { Err(failure_of(&output)) }
}

/// Returns the failure that `mercury migrate --json` has printed last; without one, the text of
/// standard error.
fn failure_of(output: &Output) -> Failure {
    #[derive(Deserialize)]
    struct Said {
        error: Failure,
    }
    let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<serde_json::Value>();
    let last = values.map_while(std::result::Result::ok).last();
    let said = last.and_then(|value| serde_json::from_value::<Said>(value).ok());
    let failure =
        said.map_or_else(|| String::from_utf8_lossy(&output.stderr).trim().into(), |said| said.error);
    Failure { exit: output.status.code(), ..failure }
}

/// Listens at the socket, which only root may use. A socket without a listener was left by a killed
/// daemon.
fn listen(path: &Path) -> Result<UnixListener> {
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("orders cannot be received at {}: {error}", path.display()))
            .hint("name another place for the socket with --socket, in a folder where root can write")
    };
    if UnixStream::connect(path).is_ok() {
        return Err(Error::new(Exit::Busy, format!("another daemon receives orders at {}", path.display()))
            .hint("`systemctl stop mercuryd` ends the system's own"));
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
        fs::create_dir_all(folder).map_err(failed)?;
        fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(failed)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use order::State;
    use std::os::unix::fs::MetadataExt;
    use std::{path::PathBuf, sync::mpsc::Sender, sync::mpsc::channel, time::Duration};

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("mercuryd-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn key(&self, line: &str) -> PathBuf {
            let file = self.0.join("key");
            fs::write(&file, line).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            file
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn some_line() -> String {
        let (_, line) = mercury_migration::session::Receiver::new(Duration::from_secs(60)).unwrap();
        line.to_string()
    }

    fn args(folder: &Folder) -> DaemonArgs {
        DaemonArgs {
            to: Some("10.0.0.2".into()),
            key_file: folder.key(&format!("mercury migrate 10.0.0.2 --key {}\n", some_line())),
            rules: folder.0.join("guard.toml"),
            socket: folder.0.join("run/control"),
            module: ModuleArgs { module: None },
            migrate: vec![],
        }
    }

    /// Runs a daemon whose moves end as the test says.
    fn with_daemon(name: &str, test: impl FnOnce(&Folder, &Path, &Sender<Moved>)) {
        let folder = Folder::new(name);
        let args = args(&folder);
        let socket = args.socket.clone();
        let (end, ends) = channel();
        let ends = std::sync::Mutex::new(ends);
        let mover: Mover = Arc::new(move |host, ticket| {
            assert!(host == "10.0.0.2");
            assert!(matches!(ticket, Ticket::Token(line) if line.starts_with("mercury-receive-1-")));
            ends.lock().unwrap().recv().unwrap()
        });
        let listener = listen(&socket).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let mut daemon = Daemon::new(spares(&args, None), mover);
            let stop = &stop;
            scope.spawn(move || daemon.serve(&listener, &|| stop.load(Ordering::Relaxed)).unwrap());
            test(&folder, &socket, &end);
            let _ = end.send(Ok(()));
            stop.store(true, Ordering::Relaxed);
        });
    }

    fn evacuate(socket: &Path, reason: &str) -> Answer {
        evacuate::ask(socket, &Order::Evacuate { reason: reason.into() }).unwrap()
    }

    /// Waits for a state of the daemon.
    fn wait_for(socket: &Path, wanted: fn(&State) -> bool) -> State {
        for _ in 0..100 {
            let state = evacuate::ask(socket, &Order::Status {}).unwrap().state;
            if wanted(&state) {
                return state;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("it has not come to that");
    }

    #[test]
    fn a_move_that_fails_says_why_and_by_which_code() {
        let output = |stdout: &str| Output {
            status: std::process::ExitStatus::default(),
            stdout: stdout.as_bytes().to_vec(),
            stderr: b"mercury migrate: broken\n".to_vec(),
        };
        let event = "{\"event\": \"accepted\"}\n";
        let refused = Error::refused("attach", mercury_abi::code::Code::SvmDisabled, None, [0; 2]);
        let json = mercury_control::output::json("migrate", &serde_json::json!({ "error": refused }));
        let failure = failure_of(&output(&format!("{event}{json}\n")));
        assert_eq!(failure.why, refused.message);
        assert_eq!(failure.code.as_deref(), Some("svm-disabled"));
        let failure = failure_of(&output(event));
        assert_eq!(failure.why, "mercury migrate: broken");
        assert!(!failure.ends_the_order());
        let status = std::os::unix::process::ExitStatusExt::from_raw(130 << 8);
        assert!(failure_of(&Output { status, ..output(event) }).ends_the_order());
    }

    #[test]
    fn a_busy_driver_is_waited_for_and_no_longer_than_its_time() {
        let busy = || Failure { exit: Some(Exit::Busy as i32), ..Failure::default() };
        let mut answers = vec![Ok(()), Err(busy())];
        assert_eq!(unless_busy(DRIVER_PATIENCE, || answers.pop().unwrap()), Ok(()));
        let mut attempts = 0;
        let refused = unless_busy(Duration::ZERO, || {
            attempts += 1;
            Err(busy())
        });
        assert_eq!((refused, attempts), (Err(busy()), 1));
    }

    #[test]
    fn one_order_at_a_time_and_each_with_its_own_line() {
        with_daemon("orders", |folder, socket, end| {
            assert_eq!(evacuate::ask(socket, &Order::Status {}).unwrap().state, State::Waiting);
            assert!(evacuate(socket, "errors").refused.is_none());
            let again = evacuate(socket, "more errors");
            assert!(again.busy, "{again:?}");
            assert_eq!(again.refused.as_deref(), Some("this machine is moving already"));
            end.send(Err("no connection".into())).unwrap();
            let failed = wait_for(socket, |state| matches!(state, State::Failed { .. }));
            assert!(matches!(
                &failed,
                State::Failed { why, reason, .. } if why == "no connection" && reason == "errors"
            ));
            // The pairing token may still be valid, because no machine has arrived.
            assert!(evacuate(socket, "errors").refused.is_none());
            end.send(Ok(())).unwrap();
            wait_for(socket, |state| matches!(state, State::Moved { .. }));
            let used = evacuate(socket, "errors").refused.unwrap();
            assert!(used.contains("was used"), "{used}");
            folder.key(&some_line());
            assert!(evacuate(socket, "errors").refused.is_none());
        });
    }

    /// Waits for the end of the moves that an order causes, and returns the hosts that were tried. A second
    /// order comes during the first move.
    fn tried(folder: &Folder, rules: &str, comes: fn(&str) -> Moved) -> (Vec<String>, Daemon) {
        let hosts = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = Arc::clone(&hosts);
        let mover: Mover = Arc::new(move |host, _| {
            seen.lock().unwrap().push(host.to_owned());
            comes(host)
        });
        let rules = Rules::parse(rules).unwrap();
        let mut daemon = Daemon::new(spares(&args(folder), Some(&rules)), mover);
        assert_eq!(daemon.answer(Order::Evacuate { reason: "errors".into() }).refused, None);
        let refused = daemon.answer(Order::Evacuate { reason: "more errors".into() }).refused.unwrap();
        assert_eq!(refused, "this machine is moving already");
        for _ in 0..100 {
            daemon.settle_the_move();
            if daemon.moving.is_none() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let hosts = hosts.lock().unwrap().clone();
        (hosts, daemon)
    }

    #[test]
    fn spares_are_tried_in_their_order() {
        let folder = Folder::new("spares");
        let spare = |name: &str, line: &str| {
            let file = folder.0.join(name);
            fs::write(&file, line).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            format!("[[spare]]\nhost = '{name}'\nkey_file = '{}'\n", file.display())
        };
        let rules = [spare("unset", "nonsense"), spare("b", &some_line()), spare("c", &some_line())].concat();
        let (hosts, mut daemon) = tried(&folder, &rules, |host| match host {
            "b" => Ok(()),
            _ => Err("no connection".into()),
        });
        assert_eq!(hosts, ["10.0.0.2", "b"]);
        assert!(matches!(daemon.desk.state(), State::Moved { to, .. } if to == "b"));
        // The next order begins with the first again, and leaves out the token that is used up.
        assert_eq!(daemon.answer(Order::Evacuate { reason: "again".into() }).refused, None);
        assert!(matches!(daemon.desk.state(), State::Evacuating { to, .. } if to == "10.0.0.2"));
        let (hosts, daemon) = tried(&folder, &rules, |_| Err("no connection".into()));
        assert_eq!(hosts, ["10.0.0.2", "b", "c"]);
        assert!(matches!(daemon.desk.state(), State::Failed { to, .. } if to == "c"));
        // A reason that lies in this machine, or the operator's decision, is the same for all spares.
        for exit in [Exit::Interrupted, Exit::State, Exit::Permission, Exit::Usage] {
            let refuse: fn(&str) -> Moved = match exit {
                Exit::Interrupted => |_| Err(Failure { exit: Some(130), ..Failure::default() }),
                Exit::State => |_| Err(Failure { exit: Some(5), ..Failure::default() }),
                Exit::Permission => |_| Err(Failure { exit: Some(6), ..Failure::default() }),
                _ => |_| Err(Failure { exit: Some(2), ..Failure::default() }),
            };
            assert_eq!(tried(&folder, &rules, refuse).0, ["10.0.0.2"], "{exit:?}");
        }
    }

    #[test]
    fn a_daemon_that_is_to_end_begins_no_other_move() {
        let folder = Folder::new("ends");
        let rules = format!("[[spare]]\nhost = 'b'\nkey_file = '{}'\n", folder.key(&some_line()).display());
        let args = args(&folder);
        let (seen, hosts) = channel();
        let (end, ends) = channel::<()>();
        let (seen, ends) = (std::sync::Mutex::new(seen), std::sync::Mutex::new(ends));
        let mover: Mover = Arc::new(move |host, _| {
            seen.lock().unwrap().send(host.to_owned()).unwrap();
            let _ = ends.lock().unwrap().recv();
            Err("killed".into())
        });
        let mut daemon = Daemon::new(spares(&args, Some(&Rules::parse(&rules).unwrap())), mover);
        assert_eq!(daemon.answer(Order::Evacuate { reason: "errors".into() }).refused, None);
        let listener = listen(&args.socket).unwrap();
        drop(end);
        daemon.serve(&listener, &|| true).unwrap();
        assert_eq!(hosts.try_iter().collect::<Vec<_>>(), ["10.0.0.2"]);
        assert!(matches!(daemon.desk.state(), State::Failed { .. }));
    }

    #[test]
    fn without_a_spare_an_order_is_refused_by_its_code() {
        let mut daemon = Daemon::new(Vec::new(), Arc::new(|_, _| Ok(())));
        let refused = daemon.answer(Order::Evacuate { reason: "errors".into() }).refused.unwrap();
        assert!(refused.contains("[no-destination]"), "{refused}");
    }

    /// The snapshot's command holds the driver, and a move beside it would be refused.
    #[test]
    fn a_move_waits_for_a_snapshot_that_is_under_way() {
        let folder = Folder::new("busy");
        let args = args(&folder);
        let is_kept = Arc::new(AtomicBool::new(false));
        let (keeps, sees) = (Arc::clone(&is_kept), Arc::clone(&is_kept));
        let busy = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            keeps.store(true, Ordering::Relaxed);
            String::new()
        });
        let mover: Mover = Arc::new(move |_, _| {
            sees.load(Ordering::Relaxed).then_some(()).ok_or_else(|| "too early".into())
        });
        let keeper = Some(Keeper::busy_with(busy));
        let mut daemon = Daemon { keeper, ..Daemon::new(spares(&args, None), mover) };
        daemon.start("10.0.0.2".into(), Ticket::Token(some_line()));
        assert_eq!(daemon.moving.unwrap().recv().unwrap(), Ok(()));
    }

    #[test]
    fn an_invalid_order_is_refused_and_the_next_one_is_read() {
        with_daemon("noise", |folder, socket, _| {
            for noise in
                ["\n", "evacuate\n", "{\"order\":\"evacuate\"}\n", "{\"order\":\"status\",\"more\":1}\n"]
            {
                let mut client = UnixStream::connect(socket).unwrap();
                client.write_all(noise.as_bytes()).unwrap();
                let mut said = String::new();
                client.read_to_string(&mut said).unwrap();
                assert!(said.contains("this is not an order"), "{noise}: {said}");
            }
            let mut long = UnixStream::connect(socket).unwrap();
            let _ = long.write_all(&[b'x'; 100_000]);
            drop(UnixStream::connect(socket).unwrap());
            fs::set_permissions(folder.0.join("key"), Permissions::from_mode(0o644)).unwrap();
            assert!(evacuate(socket, "errors").refused.unwrap().contains("chmod 600"));
            folder.key("nonsense");
            assert!(evacuate(socket, "errors").refused.is_some());
            fs::remove_file(folder.0.join("key")).unwrap();
            assert!(evacuate(socket, "errors").refused.is_some());
            assert_eq!(evacuate::ask(socket, &Order::Status {}).unwrap().state, State::Waiting);
        });
    }

    #[test]
    fn the_unit_protects_the_daemon_from_the_oom_killer() {
        let unit = include_str!("../../../../packaging/mercuryd.service");
        let has = |line: &str| unit.lines().any(|one| one == line);
        assert!(has("OOMScoreAdjust=-900") && has("OOMPolicy=continue"), "{unit}");
    }

    #[test]
    fn a_socket_is_taken_over_only_from_the_dead() {
        let folder = Folder::new("socket");
        let socket = folder.0.join("control");
        let fake = crate::guard::sensors::testing::Fake::new();
        let first = listen(&socket).unwrap();
        alone(&socket, &fake.sysroot()).unwrap();
        // Another one guards, whose socket is elsewhere.
        fake.put("proc/77/comm", "mercury\n");
        guard::report::Report { pid: 77, ..Default::default() }.write(&fake.sysroot()).unwrap();
        assert!(alone(Path::new("/nowhere"), &fake.sysroot()).unwrap_err().message.contains("process 77"));
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
        assert_eq!(listen(&socket).unwrap_err().exit, Exit::Busy);
        drop(first);
        listen(&socket).unwrap();
    }
}
