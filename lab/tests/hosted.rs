//! Pre-virtualized kernels as processes of this host, without an emulator and without privileges.
//! They come up, and their programs compute what the same programs compute on the host. A machine
//! that cannot be started is refused with the reason.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{FileExt, PermissionsExt},
        net::UnixStream,
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Image, Release, Result, artefacts,
    command::patient,
    host, hosted,
    previrtualization::{self, Built, Flavour, account},
};
use rustix::process::{Pid, Signal, kill_process};

#[path = "hosted/addresses.rs"]
mod addresses;
#[path = "hosted/copies.rs"]
mod copies;
#[path = "hosted/deaths.rs"]
mod deaths;
#[path = "hosted/disco.rs"]
mod disco;
#[path = "hosted/escapes.rs"]
mod escapes;
#[path = "hosted/footprint.rs"]
mod footprint;
#[path = "hosted/images.rs"]
mod images;
#[path = "hosted/odd.rs"]
mod odd;
#[path = "hosted/one_binary.rs"]
mod one_binary;
#[path = "hosted/page.rs"]
mod page;
#[path = "hosted/pressure.rs"]
mod pressure;
#[path = "hosted/processors.rs"]
mod processors;
#[path = "hosted/regions.rs"]
mod regions;
#[path = "hosted/saved.rs"]
mod saved;
#[path = "hosted/subnet.rs"]
mod subnet;
#[path = "hosted/tap.rs"]
mod tap;
#[path = "hosted/terminal.rs"]
mod terminal;
#[path = "hosted/verdicts.rs"]
mod verdicts;
#[path = "hosted/work.rs"]
mod work;

/// The user without any rights.
const NOBODY: &str = "65534";
/// The exit status after the guest has halted.
const HALTED: Option<i32> = Some(0);
/// The exit status after the guest has asked for a reset: here, after the panic that follows the
/// end of its first program.
const RESET: Option<i32> = Some(10);
/// The exit status of a guest that cannot go on.
const BROKEN: Option<i32> = Some(11);
/// The machine's message about a missing process ...
const CHILD_GONE: &str = "a process has ended that a processor or the guest's programs run in";
/// ... and the message's end, if the host has ended the process.
const FORBIDDEN: &str = ": by the host, for a system call that is forbidden";
/// The exit status if this host, as it is, cannot do what was asked for.
const UNFIT: Option<i32> = Some(3);
/// The separation of programs from their kernel: none, or processes of their own.
const ISOLATIONS: [&str; 2] = ["--isolation=none", "--isolation=process"];
const LIMIT: Duration = Duration::from_secs(240);

/// The files of a machine, in a place that every user may read.
struct Place {
    directory: PathBuf,
    command: PathBuf,
    kernel: PathBuf,
}

impl Place {
    fn new(name: &str) -> Result<Self> {
        Self::with(name, &previrtualization::build(Release::Bookworm, Flavour::PreVirtualized)?)
    }

    fn with(name: &str, built: &Built) -> Result<Self> {
        let program = artefacts::build_hosted()?;
        let directory = new_directory(name);
        let place = Self { command: directory.join("mercury"), kernel: directory.join("vmlinux"), directory };
        host::copy(&program, &place.command)?;
        host::copy(&program.with_file_name(artefacts::HOSTED), &place.runtime())?;
        host::copy(&built.vmlinux, &place.kernel)?;
        for path in [&place.directory, &place.command, &place.runtime(), &place.kernel] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its rights");
        }
        Ok(place)
    }

    /// Returns the path of the program that the machine's processes execute.
    fn runtime(&self) -> PathBuf {
        self.command.with_file_name(artefacts::HOSTED)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, bytes).expect("a file");
        give_to_nobody(&path);
        path
    }

    /// Copies Debian's root disk.
    fn root_disk(&self, image: &Image) -> Result<PathBuf> {
        self.copy_of(&image.disk(), "root.img")
    }

    /// Gives a read-only disk another name, or copies the disk where it cannot have one.
    fn name_for(&self, disk: &Path, name: &str) -> Result<PathBuf> {
        let link = self.directory.join(name);
        if fs::hard_link(disk, &link).is_ok() { Ok(link) } else { self.copy_of(disk, name) }
    }

    /// Copies a disk.
    fn copy_of(&self, disk: &Path, name: &str) -> Result<PathBuf> {
        let copy = self.directory.join(name);
        host::copy(disk, &copy)?;
        give_to_nobody(&copy);
        Ok(copy)
    }

    /// Returns `mercury hosted run`, as the user nobody.
    fn run(&self) -> Command {
        let mut command = as_nobody(&self.command);
        command.args(["hosted", "run", "--kernel"]).arg(&self.kernel);
        command
    }

    /// Returns the same command without user namespaces.
    fn run_without_user_namespaces(&self) -> Command {
        const LINE: &str = "echo 0 >/proc/sys/user/max_user_namespaces && exec \"$@\"";
        let mut command = as_nobody(Path::new("unshare"));
        command.args([
            "--user",
            "--keep-caps",
            "--map-user=1000",
            "--map-group=1000",
            "sh",
            "-c",
            LINE,
            "sh",
        ]);
        command.arg(&self.command).args(["hosted", "run", "--kernel"]).arg(&self.kernel);
        command
    }

    fn refusal(&self, arguments: &[&Path]) -> String {
        let output = self.run().args(arguments).stdin(Stdio::null()).output().expect("the command");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// Makes a directory that no other test has. Tests of this process that run at the same time may
/// ask for the same name, and an earlier process of the same number may have left one.
fn new_directory(name: &str) -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("mercury-{name}-{}-{number}", std::process::id()));
        match fs::create_dir(&directory) {
            Ok(()) => return directory,
            Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{}", directory.display()),
        }
    }
}

#[test]
fn tests_that_ask_for_one_name_have_a_directory_each() {
    let [one, other] = [new_directory("twice"), new_directory("twice")];
    fs::write(one.join("file"), "of one").expect("a file");
    assert!(!other.join("file").exists());
    fs::remove_dir_all(&other).expect("its end");
    assert!(one.join("file").exists());
    fs::remove_dir_all(&one).expect("its end");
}

/// Gives a file to the user that [`as_nobody`] runs as, and to no other.
fn give_to_nobody(path: &Path) {
    if rustix::process::geteuid().is_root() {
        let nobody = NOBODY.parse().ok();
        std::os::unix::fs::chown(path, nobody, nobody).expect("its owner");
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("its rights");
}

/// Returns a command that runs as the user nobody.
fn as_nobody(program: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs"]).arg(program);
    command
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A machine, its console, and its whole output.
struct Machine {
    child: Child,
    log: PathBuf,
}

impl Machine {
    fn start(place: &Place, command: &mut Command) -> Self {
        Self::with_log(command, &place.directory.join("console"))
    }

    /// Starts a machine whose console is written to this file.
    fn with_log(command: &mut Command, log: &Path) -> Self {
        let file = File::create(log).expect("a log");
        let errors = file.try_clone().expect("the same log");
        let child = command.stdin(Stdio::piped()).stdout(file).stderr(errors).spawn().expect("a machine");
        Self { child, log: log.to_owned() }
    }

    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).replace('\r', "")
    }

    fn wait_for(&mut self, text: &str) {
        self.wait_within(LIMIT, text);
    }

    fn wait_within(&mut self, limit: Duration, text: &str) {
        let start = Instant::now();
        while !self.said().contains(text) {
            let ended = self.child.try_wait().expect("its state");
            assert!(
                ended.is_none() && start.elapsed() < patient(limit),
                "no {text:?}: {ended:?}\n{}",
                self.said()
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn type_line(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("a console");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("a line on the console");
    }

    fn end(mut self, expected: Option<i32>) -> String {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("its state") {
                assert_eq!(status.code(), expected, "{}", self.said());
                return self.said();
            }
            assert!(start.elapsed() < patient(LIMIT), "it does not end\n{}", self.said());
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks that the log has no complaint of a kernel.
fn assert_well(log: &str) {
    for word in ["BUG:", "WARNING: CPU", "Oops", "rcu: INFO", "apply_alternatives", "Unable to handle"] {
        assert!(!log.contains(word), "{word}: {log}");
    }
}

/// Makes an archive with a shell and its libraries.
fn archive(tree: &Path, init: &str) -> Vec<u8> {
    archive_with(tree, init, &[])
}

/// Makes an archive with a shell, its libraries and more programs.
fn archive_with(tree: &Path, init: &str, programs: &[(&str, &Path)]) -> Vec<u8> {
    let [uname, nproc] = ["usr/bin/uname", "usr/bin/nproc"].map(|name| tree.join(name));
    let programs = [&[("bin/uname", &*uname), ("bin/nproc", &*nproc)], programs].concat();
    hosted::root_archive(tree, &programs, &[], init).expect("files of the image")
}

/// Builds a kernel from Debian's sources with the present afterburner, in every run of the tests,
/// with no uncovered instruction. The kernel comes up on one processor and on two, with both kinds
/// of isolation, and keeps its programs and itself apart.
#[test]
fn a_tiny_kernel_is_covered_and_comes_up() -> Result<()> {
    let built = previrtualization::build(Release::Bookworm, Flavour::Tiny)?;
    let account = account(&built)?;
    assert_eq!(account["uncovered"], 0);
    assert!(account["sensitive"].as_u64() > Some(1000), "{account}");
    let place = Place::with("tiny", &built)?;
    let odd = odd::program(&place.directory);
    let init = format!(
        "#!/bin/sh\necho up: $(uname -r) on $(nproc)\nread word\necho read: $word $((6 * 7))\n{}echo tried\n",
        odd::LINES
    );
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let archive = place.file("initramfs", &archive_with(&tree, &init, &[("bin/odd", &odd)]));
    for (cpus, isolation) in [("1", 0), ("2", 0), ("1", 1), ("2", 1)] {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--cpus", cpus, ISOLATIONS[isolation]]);
        let mut machine = Machine::start(&place, &mut command);
        machine.wait_for(&format!("-mercury-tiny on {cpus}\n"));
        machine.type_line("something");
        machine.wait_for("read: something 42");
        machine.wait_for("tried\n");
        let log = machine.end(RESET);
        assert_well(&log);
        odd::compare(&odd, &log);
    }
    Ok(())
}

#[test]
#[ignore = "long"]
fn an_unprivileged_shell_reads_and_writes_the_console() -> Result<()> {
    let place = Place::new("shell")?;
    let image = Image::ensure(Release::Bookworm)?;
    let init = "#!/bin/sh\necho up: $(uname -r)\nread word\necho read: $word $((6 * 7))\n";
    let archive = place.file("initramfs", &archive(&image.tree(), init));
    for (memory, isolation) in [("64", 0), ("3000", 0), ("64", 1), ("3000", 1)] {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--memory", memory, ISOLATIONS[isolation]]);
        let mut machine = Machine::start(&place, &mut command);
        machine.wait_for("up: 6.1");
        machine.type_line("something");
        machine.wait_for("read: something 42");
        let log = machine.end(RESET);
        assert!(log.contains("-mercury-small") && log.contains("Attempted to kill init"), "{log}");
    }
    Ok(())
}

/// Receives whole what is typed at once, more than the buffers of a line, a terminal and a serial
/// port hold.
#[test]
#[ignore = "long"]
fn pasted_text_arrives_complete() -> Result<()> {
    const LINES: usize = 3000;
    let place = Place::new("typed")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for options in [&[ISOLATIONS[0]][..], &[ISOLATIONS[1]], &[ISOLATIONS[0], "--cpus", "2"]] {
        let mut machine = shell_on_disk(&place, &disk, options);
        let lines: Vec<String> = (0..LINES).map(|line| format!("{line} {}", "x".repeat(line % 80))).collect();
        let text = lines.join("\n");
        machine.type_line(&format!(
            "cat > /dev/typed\n{text}\n\x04wc -l < /dev/typed; \
            awk '$1 != NR - 1 || length($2) != (NR - 1) % 80' /dev/typed | head; echo arr''ived"
        ));
        machine.wait_for("arrived\n");
        // The driver reads 256 bytes, and then checks for more. Output on the console would make it
        // check, too.
        for length in (200..420).step_by(5) {
            thread::sleep(Duration::from_millis(200));
            machine.type_line(&format!("echo {} | wc -c; echo lo''ng {length}", "x".repeat(length - 1)));
            machine.wait_for(&format!("{length}\nlong {length}\n"));
        }
        machine.type_line("poweroff -f");
        let log = machine.end(HALTED);
        assert!(log.contains(&format!("{LINES}\narrived\n")), "{log}");
        assert_well(&log);
    }
    Ok(())
}

/// Gives the terminal back, and ends the machine at Ctrl-A x.
#[test]
#[ignore = "long"]
fn a_terminal_is_the_console_until_ctrl_a_x() -> Result<()> {
    const ESCAPE: &str = "\u{1}x";
    let place = Place::new("terminal")?;
    let image = Image::ensure(Release::Bookworm)?;
    let init = "#!/bin/sh\necho up: $(uname -r)\nread word\necho read: $word\nread word\n";
    place.file("initramfs", &archive(&image.tree(), init));
    let line =
        "stty -a | cksum; ./mercury hosted run --kernel vmlinux --initramfs initramfs; stty -a | cksum";
    let mut command = Command::new("script");
    let mut machine =
        Machine::start(&place, command.args(["-qec", line, "/dev/null"]).current_dir(&place.directory));
    machine.wait_for("up: 6.1");
    machine.type_line("something");
    machine.wait_for("read: something");
    machine.type_line(ESCAPE);
    let log = machine.end(HALTED);
    let settings = |line: Option<&str>| line.and_then(|line| line.split(' ').next()).map(str::to_owned);
    assert_eq!(settings(log.lines().next()), settings(log.lines().last()), "{log}");
    Ok(())
}

/// Programs whose output depends on the processor and the kernel only.
const PROGRAMS: &[&str] = &[
    "seq 1 100000 | sort -R --random-source=/usr/bin/bash | sort -n | sha256sum",
    "xz -1 -c /usr/bin/bash | xz -dc | sha256sum",
    "gzip -nc /usr/bin/python3.11 | sha256sum",
    "tar -C /usr/share/perl5 --sort=name --mtime=@0 -cf - . | sha512sum",
    "openssl enc -aes-256-cbc -K 00 -iv 00 -in /usr/bin/bash 2>&- | openssl dgst -sha3-256",
    "awk 'BEGIN { for (i = 0; i < 200000; i++) s += sin(i) * i; printf \"%.9f\\n\", s }'",
    "perl -e '$s = 0; for (1 .. 300000) { $s = ($s * 31 + $_) % 1000003 } print \"$s\\n\"'",
    "python3 -c 'import math; print(math.fsum(math.sqrt(i) for i in range(200000)))'",
    "python3 -c 'import threading as t; l = []; ts = [t.Thread(target=lambda n=n: \
     l.append(n * n)) for n in range(50)]; [x.start() for x in ts]; [x.join() for x in ts]; print(sum(l))'",
    "python3 -c 'import os; r, w = os.pipe(); p = [os.fork() for _ in range(1)][0]; \
     os._exit(0 if os.write(w, b\"child\") else 1) if p == 0 else print(os.read(r, 9), os.waitpid(p, 0)[1])'",
    "python3 -c 'import signal, os; signal.signal(signal.SIGUSR1, lambda *a: print(\"signal\")); \
     os.kill(os.getpid(), signal.SIGUSR1)'",
    "python3 -c 'import mmap; m = mmap.mmap(-1, 64 << 20); m[::4096] = b\"x\" * (16 << 10); \
     print(m[:].count(b\"x\"))'",
    "python3 -c 'import ctypes; ctypes.string_at(1)'; echo status $?",
    "for i in $(seq 200); do /bin/true || echo no; done; echo started",
    "sh -c 'kill -9 $$'; echo status $?",
    "find /usr/include/linux -type f | LC_ALL=C sort | head -500 | sha256sum",
];

#[test]
#[ignore = "long"]
fn debian_s_programs_compute_what_they_compute_on_the_host() -> Result<()> {
    compare_programs(ISOLATIONS[0])
}

#[test]
#[ignore = "long"]
fn debian_s_programs_compute_the_same_in_processes_of_their_own() -> Result<()> {
    compare_programs(ISOLATIONS[1])
}

fn compare_programs(isolation: &str) -> Result<()> {
    let place = Place::new("debian")?;
    let image = Image::ensure(Release::Bookworm)?;
    let disk = place.root_disk(&image)?;
    let mut machine = Machine::start(
        &place,
        place.run().arg("--disk").arg(&disk).args([
            isolation,
            "--memory",
            "1024",
            "--append",
            "root=/dev/vda rw init=/bin/sh",
        ]),
    );
    machine.wait_for("Run /bin/sh as init");
    // The console's echo does not contain the markers.
    machine.type_line(
        "stty -echo; mount -t proc proc /proc; dmesg -n 1; export \
        PATH=/usr/bin:/bin:/usr/sbin:/sbin; ulimit -c 0",
    );
    machine.type_line("exec 2>&1; echo re''ady");
    machine.wait_for("ready\n");
    for (number, program) in PROGRAMS.iter().enumerate() {
        machine.type_line(&format!("echo be''gin {number}; {program}; echo e''nd {number}"));
        machine.wait_for(&format!("end {number}\n"));
    }
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert_well(&log);
    for (number, program) in PROGRAMS.iter().enumerate() {
        let here = between(&log, &format!("begin {number}\n"), &format!("end {number}\n"));
        let there = on_the_host(&image.tree(), program);
        assert_eq!(here.trim(), there.trim(), "{program}");
    }
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let rest = text.split_once(start).unwrap_or_else(|| panic!("no {start:?} in {text}")).1;
    // Prompts and kernel messages may stand between the markers.
    rest.split_once(end).unwrap_or_else(|| panic!("no {end:?} in {text}")).0
}

fn on_the_host(tree: &Path, program: &str) -> String {
    let mut command = host::as_root("chroot");
    let line = format!("exec 2>&1; ulimit -c 0; {program}");
    let output = command.arg(tree).args(["/bin/sh", "-c", &line]).output().expect("the program");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "long"]
fn postgresql_works_on_a_disk() -> Result<()> {
    use_postgresql(&[ISOLATIONS[0]])
}

#[test]
#[ignore = "long"]
fn postgresql_works_in_processes_of_its_own() -> Result<()> {
    use_postgresql(&[ISOLATIONS[1]])
}

fn use_postgresql(options: &[&str]) -> Result<()> {
    let place = Place::new("postgres")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = Machine::start(
        &place,
        place.run().arg("--disk").arg(&disk).args(options).args([
            "--memory",
            "1024",
            "--append",
            "root=/dev/vda rw init=/bin/sh",
        ]),
    );
    machine.wait_for("Run /bin/sh as init");
    for line in [
        "stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; \
         mount -t devtmpfs d /dev",
        "mkdir /dev/shm; mount -t tmpfs t /dev/shm; mount -t tmpfs t /run; dmesg -n 1; ip link set lo up",
        "install -d -o postgres /run/postgresql; pg_ctlcluster 15 main start; echo start''ed $?",
    ] {
        machine.type_line(line);
    }
    machine.wait_for("started 0\n");
    machine.type_line("pgbench -n -c 3 -t 20 bench; echo do''ne $?");
    machine.wait_for("done 0\n");
    machine.type_line("pg_ctlcluster 15 main stop; mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert!(log.contains("actually processed: 60/60") && log.contains("failed transactions: 0"), "{log}");
    assert_well(&log);
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))
}

/// A program whose system calls are rewritten. It reads its own code by its file and by its kernel,
/// and a timer interrupts it between calls. It has threads, a child that shares its memory, and a
/// child that may not make the call. A signal interrupts one call, which is then restarted.
const REWRITTEN: &str = r#"
import ctypes, os, signal, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
at = ctypes.cast(libc.getppid, ctypes.c_void_p).value
def has(line): return int(line.split('-')[0], 16) <= at < int(line.split('-')[1].split()[0], 16)
line = [l.split() for l in open('/proc/self/maps') if 'libc.so' in l and has(l)][0]
page, length = at & ~4095, 4096
in_file = page - int(line[0].split('-')[0], 16) + int(line[2], 16)
with open(line[5], 'rb') as file: file.seek(in_file); before = file.read(length)
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
parent = os.getppid()
print('parent', all(os.getppid() == parent for _ in range(400000)))
print('ticks', ticks > 3)
def work(results):
    results.append(all(os.getppid() == parent for _ in range(30000)))
results = []
threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('threads', results)
signal.setitimer(signal.ITIMER_REAL, 0, 0)
print('children', [subprocess.call(['/bin/true']) for _ in range(20)])
with open(line[5], 'rb') as file: file.seek(in_file); print('file', file.read(length) == before)
with open('/proc/self/mem', 'rb') as memory: memory.seek(page); print('kernel', memory.read(length) == before)
for _ in range(10): os.getppid()
print('rewritten', ctypes.string_at(page, length) != before)
# A child makes calls at the same places, and writes there as a debugger would.
child = os.fork()
if child == 0:
    for _ in range(1000): os.getppid()
    memory = os.open('/proc/self/mem', os.O_RDWR)
    os.lseek(memory, at, 0)
    os.write(memory, b'\xb8\x2a\x00\x00\x00\xc3')
    os._exit(libc.getppid())
print('debugged', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print('mine', os.getppid() == parent)
child = os.fork()
if child == 0:
    for _ in range(1000): os.getppid()
    libc.prctl(22, 1, 0, 0, 0)
    os.getppid()
    libc.syscall(60, 7)
print('seccomp', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# A call that is interrupted, and started again by the kernel.
before = ticks
for again in range(20):
    child = os.fork()
    if child == 0:
        for _ in range(5):
            time.sleep(0.002)
            os.kill(os.getppid(), signal.SIGALRM)
        os._exit(3)
    signal.siginterrupt(signal.SIGALRM, False)
    status = ctypes.c_int()
    assert libc.wait4(child, ctypes.byref(status), 0, None) == child and status.value == 3 << 8
print('restarted', ticks >= before + 20)
"#;

#[test]
#[ignore = "long"]
fn system_calls_are_rewritten_and_only_in_what_the_program_executes() -> Result<()> {
    let place = Place::new("rewritten")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for (options, rewritten) in [(&["--verbose"][..], "True"), (&["--verbose", "--no-rewrite"], "False")] {
        let mut machine = Machine::start(
            &place,
            place.run().arg("--disk").arg(&disk).args(options).args([
                "--memory",
                "512",
                "--append",
                "root=/dev/vda rw init=/bin/sh",
            ]),
        );
        machine.wait_for("Run /bin/sh as init");
        machine.type_line(
            "stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; dmesg -n 1",
        );
        machine.type_line("cat > /tmp/rewritten.py <<'E''ND'");
        REWRITTEN.lines().for_each(|line| machine.type_line(line));
        machine.type_line("END");
        machine.type_line(
            "python3 /tmp/rewritten.py 2>&1; echo do''ne $?; mount -o remount,ro /dev/vda /; poweroff -f",
        );
        machine.wait_for("done 0\n");
        let log = machine.end(HALTED);
        for line in [
            "parent True",
            "ticks True",
            "threads [True, True, True, True]",
            "file True",
            "kernel True",
            &format!("rewritten {rewritten}"),
            "debugged 42",
            "mine True",
            "seccomp -9",
            "restarted True",
        ] {
            assert!(log.contains(&format!("{line}\n")), "{line}: {log}");
        }
        assert_well(&log);
        // By signals alone there are more calls than the program makes.
        let calls = between(&log, "system_calls: ", ",").parse::<u64>().expect("a count");
        assert_eq!(calls < 200_000, rewritten == "True", "{log}");
    }
    Ok(())
}

/// A page of a file with a system call and a number after it. Forty programs execute the page, each
/// in its address space. One of them changes it: by writing to the file, and by a mapping. The
/// first bytes of a page are left as they are.
const SHARED_CODE: &str = r#"
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PROGRAMS, ROUNDS, AT = 40, 8, 96
# mov $39,%eax ; syscall ; mov $number,%eax ; ret
def page(number):
    code = bytes([144] * AT + [184, 39, 0, 0, 0, 15, 5, 184]) + number.to_bytes(4, 'little') + bytes([195])
    return code.ljust(4096, bytes([144]))
path = '/run/code'
open(path, 'wb').write(page(0))
file = os.open(path, os.O_RDWR)
def program(asked, answers):
    address = libc.mmap(None, ctypes.c_size_t(4096), 5, 2, file, 0)
    function = ctypes.CFUNCTYPE(ctypes.c_uint)(address + AT)
    while os.read(asked, 1):
        found = {function() for _ in range(8)}
        os.write(answers, min(found).to_bytes(4, 'little') + max(found).to_bytes(4, 'little'))
programs = []
for number in range(PROGRAMS):
    asked, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(asked[1])
        for other, _ in programs: os.close(other)
        program(asked[0], answers[1])
        os._exit(0)
    programs.append((asked[1], answers[0]))
def ask(some):
    all = set()
    for asked, answers in some:
        os.write(asked, b'x')
        found = os.read(answers, 8)
        all |= {int.from_bytes(found[:4], 'little'), int.from_bytes(found[4:], 'little')}
    return all
right = []
for number in range(1, ROUNDS + 1):
    if number % 2:
        os.pwrite(file, page(number), 0)
    else:
        with mmap.mmap(file, 4096) as memory: memory[:] = page(number)
    right.append(ask(programs) == {number})
    # Two that take turns, so that both have a copy.
    right.append(all(ask(programs[:2]) == {number} for _ in range(20)))
print('changed', all(right))
"#;

#[test]
#[ignore = "long"]
fn code_changed_by_one_program_is_executed_by_all() -> Result<()> {
    let place = Place::new("shared-code")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for options in [&["--verbose"][..], &["--isolation", "process"]] {
        let mut machine = shell_on_disk(&place, &disk, options);
        machine.type_line("mount -t tmpfs run /run; cat > /run/shared.py <<'E''ND'");
        SHARED_CODE.lines().for_each(|line| machine.type_line(line));
        machine.type_line("END");
        machine.type_line(
            "python3 /run/shared.py 2>&1; echo do''ne $?; mount -o remount,ro /dev/vda /; poweroff -f",
        );
        machine.wait_for("done 0\n");
        let log = machine.end(HALTED);
        assert!(log.contains("changed True\n"), "{log}");
        assert_well(&log);
        if options == ["--verbose"] {
            let count = |name: &str| between(&log, name, ",").parse::<u64>().expect("a count");
            // Copies were made, and dropped because the page was changed.
            assert!(count("rewritten: ") > 40 && count("dropped: ") >= 8, "{log}");
            assert!(count("moves: ") > 1000 && count("taken_over: ") > 40, "{log}");
        }
    }
    Ok(())
}

/// Pages that are used for the first time, by the program and by the kernel on its behalf: 400
/// times 128.
const FAULTS: &str = r#"
import mmap
zeroes = open('/dev/zero', 'rb', 0)
for again in range(200):
    with mmap.mmap(-1, 128 * 4096) as memory:
        for page in range(128):
            memory[page * 4096] = 1
    with mmap.mmap(-1, 128 * 4096) as memory:
        assert zeroes.readinto(memory) == 128 * 4096
"#;

#[test]
#[ignore = "long"]
fn a_fault_that_the_kernel_has_answered_does_not_come_again() -> Result<()> {
    let place = Place::new("faults")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = Machine::start(
        &place,
        place
            .run()
            .arg("--disk")
            .arg(&disk)
            .args(["--verbose", "--memory", "512", "--append"])
            .arg("root=/dev/vda rw init=/bin/sh"),
    );
    machine.wait_for("Run /bin/sh as init");
    machine.type_line(
        "stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; dmesg -n 1",
    );
    machine.type_line("cat > /tmp/faults.py <<'E''ND'");
    FAULTS.lines().for_each(|line| machine.type_line(line));
    machine.type_line("END");
    machine.type_line("python3 /tmp/faults.py; echo do''ne $?; mount -o remount,ro /dev/vda /; poweroff -f");
    machine.wait_for("done 0\n");
    let log = machine.end(HALTED);
    assert_well(&log);
    let count = |name: &str| between(&log, &format!(" {name}: "), ",").parse::<u64>().expect("a count");
    let (faults, again) = (count("faults"), count("fills"));
    assert!(faults > 51_200 && again < faults, "{faults} faults, and {again} that the page tables answered");
    Ok(())
}

/// A program that tries to reach its kernel, the monitor, or the host. Each attempt is a child's,
/// whose status is shown: negative for a signal, 7 if nothing has happened to the child.
/// Definitions of addresses come before this text.
const ATTACKS: &str = r#"
import ctypes, mmap, os, signal, time
code = mmap.mmap(-1, 4096, prot=7)
code_at = ctypes.addressof(ctypes.c_char.from_buffer(code))
function = ctypes.CFUNCTYPE(None)(code_at)
# mov $0x7fff,%eax ; syscall
no_call = bytes([184, 255, 127, 0, 0, 15, 5])
def jump(to, *arguments, before=b''):
    # mov to rax, rdi, rsi, rdx, r10, r8, r9 and r11 ; jmp *%r11
    moves = [(72, 184), (72, 191), (72, 190), (72, 186), (73, 186), (73, 184), (73, 185)]
    moves = list(zip(moves, arguments)) + [((73, 187), to)]
    made = before + b''.join(bytes(move) + value.to_bytes(8, 'little') for move, value in moves)
    made += bytes([65, 255, 227])
    code[:len(made)] = made
    function()
small_call = mmap.mmap(-1, 4096, prot=7)
small_call[:3] = bytes([205, 128, 195])
small_call = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(small_call)))
def attempt(attack, patience=0):
    child = os.fork()
    if child == 0:
        attack()
        os._exit(7)
    if patience:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print('kernel read', attempt(lambda: ctypes.string_at(KERNEL, 8)))
print('kernel write', attempt(lambda: ctypes.memmove(KERNEL, ctypes.string_at(KERNEL, 8), 8)))
print('block read', attempt(lambda: ctypes.string_at(BLOCK, 8)))
print('monitor read', attempt(lambda: ctypes.string_at(MONITOR, 8)))
if ORDERED:
    print('blind write', attempt(lambda: ctypes.memset(KERNEL, 0, 8)))
    print('stack', attempt(lambda: ctypes.string_at(0x7fffffffe000, 8)))
    map_file = lambda fd: jump(ORDERED - 2, 9, 0x10000000, 1 << 20, 3, 17, fd, 0)
    print('mmap', {attempt(lambda: map_file(fd)) for fd in range(64)})
    for name, number in [
        ('munmap', 11), ('kill', 62), ('ptrace', 101), ('clone', 56), ('execve', 59),
        ('process_vm_writev', 311), ('open', 2), ('socket', 41), ('connect', 42), ('mount', 165),
        ('io_uring_setup', 425), ('x32 open', 0x40000002),
    ]:
        call_at = lambda at: jump(at - 2, number, 1, 9, 0, 0, 0, 0)
        print(name, {attempt(lambda: call_at(at)) for at in (ORDERED, REPORTED, RETURNED)})
    print('sigreturn', attempt(lambda: jump(RETURNED - 2, 15, 0, 0, 0, 0, 0, 0)))
    print('orders', attempt(lambda: jump(REPORTED, 0)))
    # A report of an event that has not happened: the monitor takes it for the last event, again. The program
    # goes on after that event, a system call just before, and makes such reports until it is killed.
    def report(): jump(REPORTED - 2, 14, 2, ALL_SIGNALS, 0, 8, before=no_call)
    print('report', attempt(report, 1) < 0)
    others = [
        (4096,), (14, 0, ALL_SIGNALS, 0, 8), (14, 2, STATE, 0, 8), (14, 2, ALL_SIGNALS, STATE, 8),
    ]
    print('other reports', {attempt(lambda: jump(REPORTED - 2, *words)) for words in others})
    def spin():
        while True: pass
    print('spin', attempt(spin, 1))
    # A program that has come to the call by itself has signals that are not blocked. The next program
    # in that process must not meet them.
    def after_a_report(_):
        attempt(report, 0.2)
        return attempt(spin, 0.2)
    print('spins', {after_a_report(number) for number in range(100)})
    print('small call', attempt(small_call))
    def scribble():
        for byte in range(256): ctypes.memset(STATE, byte, 65536)
        for byte in range(256): ctypes.memset(STATE, byte, 4096); os.getppid()
    print('scribble', attempt(scribble))
    def float_state():
        total = 0.0
        for number in range(20000):
            total += number * 0.5
            if number % 100 == 0: ctypes.memset(STATE + 16384, 255, 49152); os.getppid()
        os._exit(7 if total == 99995000.0 else 8)
    print('float', attempt(float_state))
print('well', os.getpid() > 0)
"#;

/// A program that tries to make its kernel do the same for it. The kernel takes these addresses for
/// programs': they are below the end of programs' memory. The error of each call is shown for all
/// addresses, and the status for attempts on a child.
const ERRANDS: &str = r#"
import ctypes, errno, mmap, os, select, signal, socket, stat
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(one) for one in arguments])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
def attempt(attack):
    child = os.fork()
    if child == 0:
        attack()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
kept = []
def keep(one):
    kept.append(one)
    return one
def at(words):
    return ctypes.addressof(keep(words))
def full():
    reading, writing = os.pipe()
    os.write(writing, b'x' * 4096)
    return reading
os.mknod('/tmp/zero', 0o600 | stat.S_IFCHR, os.makedev(1, 5))
zero = os.open('/tmp/zero', os.O_RDONLY)
file = os.open('/tmp/written', os.O_RDWR | os.O_CREAT)
os.write(file, b'x' * 4096)
directory = os.open('/', os.O_RDONLY)
writing = os.pipe()[1]
word = (ctypes.c_int * 2)(0, 0)
def vector(address): return (ctypes.c_long * 4)(address, 8, address, 8)
def message(address, what):
    parts = [0, 0, 0, 0, 0, 0, 0]
    parts[what] = address
    if what == 2: parts[3] = 1
    if what == 4: parts[5] = 64
    return (ctypes.c_long * 7)(*parts)
def pair(send=lambda other: other.send(b'x' * 64)):
    one, other = keep(socket.socketpair())
    send(other)
    return one
def passed():
    return pair(lambda other: socket.send_fds(other, [b'x'], [0]))
poll = select.epoll()
poll.register(full(), select.EPOLLIN)
CALLS = {
    'write to pipe': lambda to: call(1, writing, to, 8),
    'write to file': lambda to: call(18, file, to, 8, 0),
    'read from pipe': lambda to: call(0, full(), to, 8),
    'read from file': lambda to: call(17, file, to, 8, 0),
    'read zeros': lambda to: call(0, zero, to, 8),
    'read many zeros': lambda to: call(0, zero, to, 4096),
    'writev': lambda to: call(20, writing, to, 2),
    'writev from': lambda to: call(20, writing, at(vector(to)), 2),
    'readv to': lambda to: call(19, full(), at(vector(to)), 2),
    'open': lambda to: call(2, to, 0),
    'execve': lambda to: call(59, at(ctypes.create_string_buffer(b'/bin/true')), to, 0),
    'stat': lambda to: call(4, at(ctypes.create_string_buffer(b'/')), to),
    'getcwd': lambda to: call(79, to, 64),
    'getdents': lambda to: call(217, directory, to, 4096),
    'uname': lambda to: call(63, to),
    'pipe': lambda to: call(22, to),
    'poll': lambda to: call(7, to, 1, 0),
    'select': lambda to: call(23, 8, to, 0, 0, at((ctypes.c_long * 2)(0, 0))),
    'epoll_wait': lambda to: call(232, poll.fileno(), to, 1, 0),
    'sigaction from': lambda to: call(13, 10, to, 0, 8),
    'sigaction to': lambda to: call(13, 10, 0, to, 8),
    'sigprocmask': lambda to: call(14, 0, 0, to, 8),
    'sigaltstack': lambda to: call(131, 0, to),
    'futex wait': lambda to: call(202, to, 128, 0, 0, 0, 0),
    'futex wake': lambda to: call(202, at(word), 128 | 5, 1, 1, to, 0),
    'futex or': lambda to: call(202, at(word), 128 | 5, 1, 1, to, 2 << 28),
    'futex lock': lambda to: call(202, to, 128 | 6, 0, 0, 0, 0),
    'waitid': lambda to: (os.fork() or os._exit(0)) and call(247, 0, 0, to, 4, 0),
    'getrandom': lambda to: call(318, to, 64, 0),
    'recvmsg': lambda to: call(47, pair().fileno(), to, 0),
    'recvmsg to': lambda to: call(47, pair().fileno(), at(message(at(vector(to)), 2)), 0),
    'sendmsg from': lambda to: call(46, pair().fileno(), at(message(at(vector(to)), 2)), 0),
    'set_robust_list': lambda to: call(274, 0, to, to),
    'gettimeofday': lambda to: call(96, to, 0),
}
for name, one in CALLS.items():
    print('errand', name, {one(to) for to in PLACES})
# A message with a descriptor. A part that cannot be written to the program is left out.
for to in PLACES: call(47, passed().fileno(), at(message(to, 4)), 0)
code = mmap.mmap(-1, 4096, prot=7)
code_at = ctypes.addressof(ctypes.c_char.from_buffer(code))
def run(made):
    code[:len(made)] = made
    ctypes.CFUNCTYPE(None)(code_at)()
def number(value): return value.to_bytes(8, 'little')
caught = lambda *_: None
def deliver(to):
    # A signal's frame goes where the stack pointer is: mov $to,%rsp ; getpid ; kill(it, SIGUSR1)
    signal.signal(signal.SIGUSR1, caught)
    calls = bytes.fromhex('b8270000000f0589c7be0a000000b83e0000000f050f0b')
    run(bytes.fromhex('48bc') + number(to + 4096) + calls)
def come_back(to):
    # Return from a signal, whose frame is at this address.
    run(bytes.fromhex('48bc') + number(to) + bytes.fromhex('b80f0000000f050f0b'))
def restore(to):
    # The handler reports the floating-point registers at this address:
    # mov $to,%rax ; mov %rax,0xe0(%rdx) ; ret
    made = bytes.fromhex('48b8') + number(to) + bytes.fromhex('488982e0000000c3')
    code[:len(made)] = made
    libc.signal(10, ctypes.c_void_p(code_at))
    os.kill(os.getpid(), 10)
def robust(to):
    call(273, at(vector(to)), 24)
    os._exit(7)
print('errand signal', {attempt(lambda: deliver(to)) for to in PLACES})
print('errand sigreturn', {attempt(lambda: come_back(to)) for to in PLACES})
print('errand registers', {attempt(lambda: restore(to)) for to in PLACES})
print('errand robust', {attempt(lambda: robust(to)) for to in PLACES})
# Buffers that begin in a program's memory and end beyond it.
fixed = call(9, EDGE - 4096, 4096, 3, 0x32, -1, 0)
ctypes.memset(EDGE - 4096, 65, 4096)
print(
    'edge', fixed == EDGE - 4096, call(1, writing, EDGE - 4, 8), call(0, full(), EDGE - 4, 8),
    call(2, EDGE - 4, 0), call(79, EDGE - 1, 64), ctypes.string_at(EDGE - 4, 4),
)
# Calls with right buffers are carried out.
path = ctypes.create_string_buffer(b'/tmp/written')
ctypes.memmove(EDGE - len(path), path, len(path))
print(
    'right', call(2, EDGE - len(path), 0) > 2, call(1, writing, EDGE - 4, 4),
    call(0, zero, EDGE - 4096, 4096), ctypes.string_at(EDGE - 4096, 4096) == bytes(4096),
)
# No program gets these addresses, so that no call can be restarted for ever.
given = {call(9, to & -4096, 4096, 3, 0x32, -1, 0) for to in PLACES}
print('given', given, call(9, EDGE - 4096, 8192, 3, 0x32, -1, 0))
moved = {call(25, fixed, 4096, 4096, 3, to & -4096) for to in PLACES}
print('moved', moved, call(25, fixed, 4096, 8192, 0, 0))
print('near', {call(9, to & -4096, 4096, 3, 0x22, -1, 0) > END for to in PLACES})
grown = call(9, END, 4096, 3, 0x132, -1, 0) == END
print('grown', grown, call(202, END - 8, 128 | 6, 0, 0, 0, 0), call(1, writing, END - 8, 8))
print('behind', call(1, writing, END, 8), call(202, END, 128 | 6, 0, 0, 0, 0))
count = 0
def counted(*_):
    global count
    count += 1
signal.signal(signal.SIGUSR1, counted)
half = 0.5
for _ in range(200): os.kill(os.getpid(), signal.SIGUSR1); half *= 1.0
print('signals', count, half)
print('names', len(os.listdir('/usr/bin')) > 100, 'env' in os.listdir('/usr/bin'))
print('end')
"#;

/// Reads its kernel's memory and the monitor's in a program without isolation. In a process of its
/// own the program does neither, and gets nowhere by the code that shares its process.
#[test]
#[ignore = "long"]
fn a_program_in_a_process_of_its_own_reaches_nothing_else() -> Result<()> {
    use mercury_hosted::{isolation::stub, layout};
    let place = Place::new("attacks")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let kernel = layout::DIRECT_MAP + (16 << 20);
    // Programs in Rust are loaded there when addresses are not random.
    let monitor = 0x5555_5555_4000_u64;
    let places = stub::places();
    for isolation in ISOLATIONS {
        let ordered = if isolation == ISOLATIONS[1] { places.ordered } else { 0 };
        let mut machine = Machine::start(
            &place,
            place.run().arg("--disk").arg(&disk).args([
                isolation,
                "--memory",
                "512",
                "--append",
                "root=/dev/vda rw init=/bin/sh",
            ]),
        );
        machine.wait_for("Run /bin/sh as init");
        machine.type_line(
            "stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; dmesg -n 1; \
             ulimit -c 0",
        );
        machine.type_line("cat > /tmp/attacks.py <<'E''ND'");
        machine.type_line(&format!("KERNEL, BLOCK, MONITOR = {kernel}, {}, {monitor}", layout::BLOCK));
        machine.type_line(&format!(
            "ORDERED, REPORTED, RETURNED, STATE, ALL_SIGNALS = {ordered}, {}, {}, {}, {}",
            places.reported,
            places.returned,
            layout::STUB_STATE,
            places.all_signals
        ));
        ATTACKS.lines().for_each(|line| machine.type_line(line));
        machine.type_line("END");
        machine.type_line("python3 /tmp/attacks.py 2>&1; echo do''ne $?; poweroff -f");
        machine.wait_for("done 0\n");
        let log = machine.end(HALTED);
        let (unhindered, segfault) = (7, -11);
        let reads = if ordered == 0 { unhindered } else { segfault };
        let mut expected: Vec<String> = ["kernel read", "kernel write", "block read", "monitor read"]
            .map(|attack| format!("{attack} {reads}"))
            .into();
        if ordered != 0 {
            expected.extend(
                ["blind write", "stack", "sigreturn", "orders", "small call"]
                    .map(|attack| format!("{attack} {segfault}")),
            );
            expected.extend(
                ["mmap", "munmap", "kill", "ptrace", "clone", "execve", "process_vm_writev", "open"]
                    .map(|attack| format!("{attack} {{{segfault}}}")),
            );
            expected.extend(
                ["socket", "connect", "mount", "io_uring_setup", "x32 open"]
                    .map(|attack| format!("{attack} {{{segfault}}}")),
            );
            expected.extend(["scribble", "float"].map(|attack| format!("{attack} {unhindered}")));
            expected
                .extend(["report True", "other reports {-11}", "spin -9", "spins {-9}"].map(String::from));
        }
        expected.push("well True".into());
        for line in expected {
            assert!(log.contains(&format!("{line}\n")), "{line}: {log}");
        }
        assert_well(&log);
    }
    Ok(())
}

/// Reads the memory of the monitor's process.
fn monitor_s(machine: &Machine, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let memory = File::open(format!("/proc/{}/mem", machine.child.id())).expect("the monitor's memory");
    memory.read_exact_at(&mut bytes, address).expect("what is there");
    bytes
}

/// Refuses, in the kernel, to do for a program what the program cannot do itself. The kernel could:
/// its own memory and the monitor's have addresses that it takes for programs'.
#[test]
#[ignore = "long"]
fn a_kernel_is_not_sent_to_what_its_programs_cannot_reach() -> Result<()> {
    use mercury_hosted::{block, layout};
    let place = Place::new("errands")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let (kernel, end) = (layout::DIRECT_MAP + (16 << 20), layout::DIRECT_MAP + (512 << 20));
    let mut machine = shell_on_disk(&place, &disk, &[ISOLATIONS[1], "--verbose"]);
    machine.type_line("cat > /tmp/errands.py <<'E''ND'");
    machine.type_line(&format!(
        "PLACES = [{kernel}, {}, {}, {}, {}]\nEDGE, END = {}, {end}",
        block::at::ENTRY,
        layout::THUNKS,
        layout::FIXMAP,
        end - 8192,
        layout::THUNKS
    ));
    ERRANDS.lines().for_each(|line| machine.type_line(line));
    machine.type_line("END");
    let watched = [(kernel, 8192), (layout::THUNKS, 8192), (block::at::ENTRY, 8)];
    let before = watched.map(|(address, length)| monitor_s(&machine, address, length));
    machine.type_line("python3 /tmp/errands.py 2>&1; echo do''ne $?");
    machine.wait_for("done 0\n");
    let after = watched.map(|(address, length)| monitor_s(&machine, address, length));
    assert!(before == after, "the kernel's memory or the monitor's has changed");
    machine.type_line("poweroff -f");
    let log = machine.end(HALTED);
    let errands: Vec<&str> = log.lines().filter_map(|line| line.strip_prefix("errand ")).collect();
    assert!(errands.len() > 30, "{log}");
    for errand in errands {
        let expected = match errand.split(" {").next() {
            Some("signal" | "sigreturn" | "registers") => "{-11}",
            // The kernel reads this list when the program has ended.
            Some("robust") => "{7}",
            _ => "{'EFAULT'}",
        };
        assert!(errand.ends_with(expected), "{errand}: {log}");
    }
    for line in [
        "edge True EFAULT EFAULT EFAULT EFAULT b'AAAA'",
        "right True 4 4096 True",
        "given {'ENOMEM'} ENOMEM",
        "moved {'ENOMEM'} ENOMEM",
        "near {True}",
        "grown True EFAULT EFAULT",
        "behind 8 0",
        "signals 200 0.5",
        "names True True",
        "end",
    ] {
        assert!(log.contains(&format!("{line}\n")), "{line}: {log}");
    }
    assert_well(&log);
    Ok(())
}

/// Returns the processes that run this program.
fn processes_of(program: &Path) -> Vec<i32> {
    let numbers = fs::read_dir("/proc").expect("processes").flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        (fs::read_link(entry.path().join("exe")).ok()? == program).then_some(number)
    });
    numbers.collect()
}

fn signal(process: i32, signal: Signal) {
    let process = Pid::from_raw(process).expect("a process");
    let _ = kill_process(process, signal);
}

/// Leaves no process of a machine, whichever of its processes is killed.
#[test]
#[ignore = "long"]
fn a_killed_machine_leaves_no_process() -> Result<()> {
    kill_at_any_moment(ISOLATIONS[0], 3, [1, 2])
}

#[test]
#[ignore = "long"]
fn a_killed_isolated_machine_leaves_no_process() -> Result<()> {
    kill_at_any_moment(ISOLATIONS[1], 10, [1, 40])
}

/// Kills a machine, which has more than `least` processes, at any moment. Then it kills others of the
/// processes, in the order of their start: one that is in use, and one that is not, or that makes others.
fn kill_at_any_moment(isolation: &str, least: usize, others: [usize; 2]) -> Result<()> {
    let place = Place::new("killed")?;
    let image = Image::ensure(Release::Bookworm)?;
    let init = "#!/bin/sh\necho up: $(uname -r)\nwhile :; do /bin/uname >/dev/console; done\n";
    let archive = place.file("initramfs", &archive(&image.tree(), init));
    let start = || {
        let mut command = place.run();
        command.arg("--initramfs").arg(&archive).args(["--memory", "128", isolation]);
        Machine::start(&place, &mut command)
    };
    let is_gone = || {
        let start = Instant::now();
        while !processes_of(&place.runtime()).is_empty() {
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", processes_of(&place.runtime()));
            thread::sleep(Duration::from_millis(5));
        }
    };
    let begin = Instant::now();
    let mut machine = start();
    machine.wait_for("up: 6.1");
    let needed = begin.elapsed();
    drop(machine);
    is_gone();
    const STEPS: u32 = 40;
    let (mut most, mut was_up, mut step) = (0, false, 0);
    // A host that has more work than at the measurement takes longer, so there are more moments.
    while step < STEPS || !was_up {
        assert!(step < 10 * STEPS, "no program ran after {:?}", needed * step / STEPS);
        let mut machine = start();
        thread::sleep(needed * 5 / 4 * step / STEPS);
        most = most.max(processes_of(&place.runtime()).len());
        was_up |= machine.said().contains("up: 6.1");
        machine.child.kill().expect("its end");
        machine.child.wait().expect("its state");
        is_gone();
        step += 1;
    }
    assert!(most > least, "there were {most} processes at most");
    for which in others {
        let mut machine = start();
        machine.wait_for("up: 6.1");
        let mut processes = processes_of(&place.runtime());
        processes.sort_unstable();
        signal(processes[which], Signal::KILL);
        let log = machine.end(BROKEN);
        assert!(log.contains(CHILD_GONE), "{log}");
        is_gone();
    }
    Ok(())
}

/// Keeps a program that has passed the monitor away from the host. Without isolation nothing
/// protects guest kernel, programs and monitor from each other, but the host is protected from all
/// of them.
#[test]
#[ignore = "long"]
fn a_program_that_gets_past_the_monitor_does_not_reach_the_host() -> Result<()> {
    let place = Place::new("escape")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = Machine::start(
        &place,
        place.run().arg("--disk").arg(&disk).args([
            "--memory",
            "512",
            "--append",
            "root=/dev/vda rw init=/bin/sh",
        ]),
    );
    machine.wait_for("Run /bin/sh as init");
    machine.type_line("export PATH=/usr/bin; echo re''ady");
    machine.wait_for("ready\n");
    // The program tells the host's kernel that its system calls are the monitor's, and makes a call
    // that the monitor does not need. No page fault may come in between, because the monitor would
    // take the fault for one of its own: so both lie in one page of code, which RET maps first.
    //   ret; mov byte ptr [rdi], 0; mov eax, SYS_getppid; syscall; ret
    let code = r"\xc3\xc6\x07\x00\xb8\x6e\x00\x00\x00\x0f\x05\xc3";
    let selector = mercury_hosted::block::at::SELECTOR;
    machine.type_line(&format!(
        "python3 -c 'from ctypes import *\nimport mmap\npage = mmap.mmap(-1, 4096, prot=7)\n\
         page.write(b\"{code}\")\nat = addressof(c_char.from_buffer(page))\nCFUNCTYPE(None)(at)()\n\
         pass_monitor = CFUNCTYPE(None, c_void_p)(at + 1)\nwhile 1: pass_monitor({selector})'"
    ));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = machine.child.try_wait().expect("its state") {
            break status;
        }
        assert!(start.elapsed() < patient(LIMIT), "it still runs\n{}", machine.said());
        thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(status.code(), BROKEN, "{}", machine.said());
    assert!(machine.said().contains(FORBIDDEN), "{}", machine.said());
    Ok(())
}

#[test]
#[ignore = "long"]
fn an_unusable_kernel_is_refused_with_the_reason() -> Result<()> {
    use object::{Object, ObjectSection};

    let place = Place::new("refused")?;
    let path = |text: &'static str| Path::new(text);
    let refused = |arguments: &[&Path], reason: &str| {
        let said = place.refusal(arguments);
        assert!(said.contains(reason) && !said.contains("panicked"), "{reason}: {said}");
    };
    refused(&[path("--memory"), path("20")], "20 MiB of memory are not enough");
    refused(&[path("--initramfs"), path("/nowhere")], "cannot read /nowhere");
    refused(&[path("--disk"), path("/nowhere")], "cannot open the disk /nowhere");
    let empty = place.file("empty", b"");
    refused(&[path("--disk"), &empty], "is empty");
    refused(&[path("--disk"), path("/")], "is neither a file nor a block device");
    let disk = place.file("disk", &[0; 4096]);
    let read_only = place.file("read-only", &[0; 4096]);
    fs::set_permissions(&read_only, fs::Permissions::from_mode(0o444)).expect("its rights");
    refused(&[path("--disk"), &read_only], "append `,ro` to its name to open it read-only");
    let held = File::open(&disk).expect("the disk");
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    refused(&[path("--disk"), &disk], "is in use");
    refused(&[path("--net"), path("tap=mercury-none")], "there is no interface mercury-none");
    refused(&[path("--net"), path("passt"), path("--forward"), path("1-")], "passt does not start");
    let output = place.run_without_user_namespaces().args(["--net", "passt"]).output().expect("the command");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == UNFIT && said.contains("the host allows no user namespaces"),
        "{output:?}"
    );
    refused(&[path("--gdb"), path("/nowhere/gdb")], "cannot listen at /nowhere/gdb");
    refused(
        &[path("--gdb"), path("/nowhere/gdb"), path("--cpus"), path("2")],
        "gdb works only with machines of one processor",
    );
    let kernel = fs::read(&place.kernel).expect("the kernel");
    for (bytes, reason) in [
        (&b"no kernel"[..], "this is no ELF file"),
        (&fs::read("/bin/true").expect("a program")[..], "this is a program or a part of one"),
        (&kernel[..kernel.len() / 3], "vmlinux: "),
    ] {
        fs::write(&place.kernel, bytes).expect("another kernel");
        refused(&[], reason);
    }
    // The second record becomes a copy of the first one, so one instruction has none.
    let mut without = kernel.clone();
    let (start, _) = object::File::parse(&*kernel)
        .expect("the kernel")
        .section_by_name(mercury_afterburner::record::SECTION)
        .and_then(|section| section.file_range())
        .expect("records");
    let (start, size) = (start as usize, mercury_afterburner::record::SIZE);
    without.copy_within(start..start + size, start + size);
    fs::write(&place.kernel, &without).expect("another kernel");
    refused(&[], "uncovered: ");
    fs::write(&place.kernel, &kernel).expect("the kernel");
    let strip = Command::new("strip").arg(&place.kernel).status().expect("strip");
    assert!(strip.success());
    refused(&[], "it was not pre-virtualized, or has been stripped");
    Ok(())
}

/// The first commands in a machine whose first program is a shell.
const SHELL: &str = "stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; \
     mount -t sysfs s /sys; mount -t devtmpfs d /dev; dmesg -n 1; echo re''ady";

/// Starts Debian's disk with a shell as the first program.
fn shell_on_disk(place: &Place, disk: &Path, options: &[&str]) -> Machine {
    shell_with_memory(place, disk, "512", options)
}

/// Starts Debian's disk as [`shell_on_disk`] does, with so many MiB.
fn shell_with_memory(place: &Place, disk: &Path, mib: &str, options: &[&str]) -> Machine {
    let words = ["--memory", mib, "--append", "root=/dev/vda rw init=/bin/sh"];
    let mut machine = Machine::start(place, place.run().arg("--disk").arg(disk).args(words).args(options));
    machine.wait_for("Run /bin/sh as init");
    machine.type_line(SHELL);
    machine.wait_for("ready\n");
    machine
}

/// Returns this host's address with its length, and its gateway. passt gives both to the guest.
fn addresses() -> (String, String) {
    let said = |arguments: &[&str]| {
        let output = Command::new("ip").args(arguments).output().expect("ip");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let after = |text: &str, word: &str| {
        let mut words = text.split_whitespace().skip_while(|one| *one != word);
        words
            .nth(1)
            .unwrap_or_else(|| panic!("no {word} in {text:?}: passt needs a default route"))
            .to_owned()
    };
    let route = said(&["-4", "route", "show", "default"]);
    let address = said(&["-4", "-o", "address", "show", "dev", &after(&route, "dev")]);
    (after(&address, "inet"), after(&route, "via"))
}

/// Sends some megabytes from a server on the host to the guest, and from a server in the guest
/// back, by a port that passt forwards.
#[test]
#[ignore = "long"]
fn a_network_card_is_connected_by_passt_and_randomness_is_the_host_s() -> Result<()> {
    const LENGTH: usize = 16 << 20;
    let place = Place::new("network")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut bytes = vec![0; LENGTH];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).expect("bytes");
    let server = TcpListener::bind("127.0.0.1:0").expect("a server");
    let port = server.local_addr().expect("its port").port();
    let free = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).expect("a port").port();
    let forward = format!("127.0.0.1/{free}:8080");
    let options = ["--net", "passt,host", "--mac", "52:54:00:12:34:56", "--forward", &forward];
    let mut machine = shell_on_disk(&place, &disk, &options);
    let (address, gateway) = addresses();
    machine.type_line(&format!(
        "ip address add {address} dev eth0; ip link set eth0 up; ip route add default via {gateway}; cat \
         /sys/class/net/eth0/address /sys/class/misc/hw_random/rng_current; head -c 64 /dev/hwrng > /tmp/a; \
         head -c 64 /dev/hwrng > /tmp/b; cmp -s /tmp/a /tmp/b; echo diff''ers $?"
    ));
    machine.wait_for("differs 1\n");
    assert!(machine.said().contains("52:54:00:12:34:56\nvirtio_rng"), "{}", machine.said());
    machine.type_line(&format!(
        "python3 -c 'import socket, shutil; s = socket.create_connection((\"{gateway}\", {port})); \
         shutil.copyfileobj(s.makefile(\"rb\"), open(\"/tmp/bytes\", \"wb\"))'; cksum < /tmp/bytes; \
         echo re''ceived"
    ));
    let (mut connection, _) = server.accept().expect("a connection from the guest");
    connection.write_all(&bytes).expect("the bytes on their way");
    drop(connection);
    machine.wait_for("received\n");
    assert!(machine.said().contains(&format!(" {LENGTH}\n")), "{}", machine.said());
    // The file goes twice, the second time while the guest only waits.
    machine.type_line(
        "python3 -c 'import socket; l = socket.create_server((\"\", 8080)); print(\"list\" + \"ening\", \
         flush=True); [(lambda s: (s.recv(1), s.sendfile(open(\"/tmp/bytes\", \"rb\")), \
         s.close()))(l.accept()[0]) for _ in range(2)]'; echo se''nt",
    );
    machine.wait_for("listening\n");
    for _ in 0..2 {
        let mut back = Vec::new();
        let mut connection = TcpStream::connect(("127.0.0.1", free)).expect("the forwarded port");
        connection.write_all(b"?").expect("a request");
        connection.read_to_end(&mut back).expect("the bytes on their way back");
        assert!(back == bytes, "{} bytes came back: {}", back.len(), machine.said());
        thread::sleep(Duration::from_secs(1));
    }
    machine.wait_for("sent\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    assert_well(&machine.end(HALTED));
    Ok(())
}

/// Waits with gdb for a kernel's first function, stops it at a system call, reads its variables,
/// steps, and lets it go.
#[test]
#[ignore = "long"]
fn gdb_sets_breakpoints_steps_and_sees_variables() -> Result<()> {
    let place = Place::new("gdb")?;
    let image = Image::ensure(Release::Bookworm)?;
    // A shell asks for its parent's number when it starts.
    let init = "#!/bin/sh\necho up: $(uname -r)\nread word\nsh -c true\necho read: $word\nread word\n";
    let archive = place.file("initramfs", &archive(&image.tree(), init));
    let socket = place.directory.join("gdb");
    // The user of the machine makes a socket in this directory.
    fs::set_permissions(&place.directory, fs::Permissions::from_mode(0o777)).expect("its rights");
    let wait = format!("{},wait", socket.display());
    let mut machine =
        Machine::start(&place, place.run().arg("--initramfs").arg(&archive).args(["--gdb", &wait]));
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed() < patient(LIMIT), "no socket\n{}", machine.said());
        thread::sleep(Duration::from_millis(50));
    }
    let script = [
        "set pagination off",
        "break start_kernel",
        "continue",
        "x/s (char*)&linux_banner",
        "delete",
        "break __x64_sys_uname",
        "break __x64_sys_newuname",
        "continue",
        "stepi",
        "stepi",
        "stepi",
        "printf \"at %#lx flags %#x jiffies %d\\n\", $rip, $eflags, *(long*)&jiffies != 0",
        "delete",
        "detach",
        "quit",
    ];
    let script = place.file("script", script.join("\n").as_bytes());
    let said = gdb(&place, &socket, &script);
    for line in
        ["Breakpoint 1, ", "in start_kernel ()", "Linux version 6.1", "uname ()", "jiffies 1\n", "detached"]
    {
        assert!(said.contains(line), "{line}: {said}\n{}", machine.said());
    }
    machine.wait_for("up: 6.1");
    // gdb connects again, to a guest that sleeps. Its last request is the machine's end.
    let script = place
        .file("script", b"info symbol $rip\nprintf \"jiffies %d\\n\", *(long*)&jiffies != 0\ndetach\nquit\n");
    let said = gdb(&place, &socket, &script);
    assert!(said.contains("jiffies 1") && said.contains("in section .text"), "{said}");
    machine.type_line("something");
    machine.wait_for("read: something");
    interrupt(&socket);
    let script = place.file("script", b"kill\nquit\n");
    gdb(&place, &socket, &script);
    let log = machine.end(HALTED);
    assert!(log.contains("ended by gdb"), "{log}");
    assert_well(&log);
    Ok(())
}

/// Interrupts the guest in the protocol's own words, since a gdb without a terminal is hard to
/// interrupt: the guest goes on, is stopped, and let go.
fn interrupt(socket: &Path) {
    let mut stream = UnixStream::connect(socket).expect("the machine");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let packet = |text: &str| {
        let sum = text.bytes().fold(0_u8, u8::wrapping_add);
        format!("+${text}#{sum:02x}")
    };
    stream.write_all(packet("vCont;c").as_bytes()).expect("it goes on");
    thread::sleep(Duration::from_secs(1));
    stream.write_all(&[3]).expect("Ctrl-C");
    let mut said = String::new();
    while !said.contains('#') {
        let mut bytes = [0; 100];
        let count = stream.read(&mut bytes).expect("an answer");
        assert_ne!(count, 0, "the end after {said}");
        said += &String::from_utf8_lossy(&bytes[..count]);
    }
    assert!(said.contains("$S02") || said.contains("$T02"), "{said}");
    stream.write_all(packet("D").as_bytes()).expect("it is let go");
    let _ = stream.read(&mut [0; 100]);
}

fn gdb(place: &Place, socket: &Path, script: &Path) -> String {
    let mut command = Command::new("timeout");
    command.arg("120").arg(&place.command).args(["hosted", "gdb", "--kernel"]).arg(&place.kernel).arg(socket);
    let output = command.args(["--", "-nx", "-batch", "-x"]).arg(script).output().expect("gdb");
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}

/// Leaves a whole file system with all flushed data after a kill of the machine, while several
/// programs write and flush at once.
#[test]
#[ignore = "long"]
fn a_killed_machine_leaves_what_a_power_cut_leaves() -> Result<()> {
    const WRITERS: usize = 4;
    const LENGTH: usize = 5000;
    let place = Place::new("killed")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let mut machine = shell_on_disk(&place, &disk, &[]);
    machine.type_line(&format!(
        "python3 -c 'import os, sys, itertools\n\
         for n in range({WRITERS}):\n\
         \x20 if os.fork() == 0:\n\
         \x20   f = os.open(f\"/root/written-{{n}}\", os.O_CREAT | os.O_WRONLY)\n\
         \x20   for i in itertools.count():\n\
         \x20     os.write(f, b\"%06d\" % i + b\"x\" * {}); os.fsync(f); os.write(1, \
         b\"flu%s %d %d\\n\" % (b\"shed\", n, i))\n\
         os.wait()'",
        LENGTH - 6
    ));
    for writer in 0..WRITERS {
        machine.wait_for(&format!("flushed {writer} 40\n"));
    }
    machine.child.kill().expect("the machine killed");
    machine.child.wait().expect("its end");
    let log = machine.said();
    let repaired = host::as_root("e2fsck").args(["-fp"]).arg(&disk).status().expect("e2fsck");
    assert!(matches!(repaired.code(), Some(0 | 1)), "{repaired}");
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))?;
    for writer in 0..WRITERS {
        let numbers =
            log.lines().filter_map(|line| line.strip_prefix(&format!("flushed {writer} "))?.parse().ok());
        let last: usize = numbers.max().expect("it has flushed");
        let request = format!("cat /root/written-{writer}");
        let read = Command::new("debugfs").args(["-R", &request]).arg(&disk).output().expect("debugfs");
        let records: Vec<&[u8]> = read.stdout.chunks(LENGTH).collect();
        assert!(records.len() > last, "{writer} has flushed {last}, and {} are there", records.len());
        for (number, record) in records[..=last].iter().enumerate() {
            assert!(record.starts_with(format!("{number:06}xxx").as_bytes()), "{writer}: {number}");
        }
    }
    Ok(())
}
