//! `make pair`: two machines on one network, and a shell on this terminal that moves from one to the other.
//!
//! A third machine is the switch between the two, and the NFS server of their root. The terminal
//! shows the serial console of the machine that runs the shell.
//!
//! After that machine has moved, the terminal shows the other machine's console, and the shell goes
//! on there: the shell is a process like any other. The machine that was left boots again, as the
//! next destination.

use std::{
    io::{self, IsTerminal, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::{
    driver::Variant,
    error::{Context, Error, Result, wait_for},
    kernel::Kernel,
    live::say,
    machine::Machine,
    moving::{GOES_ON, Switch, plug_in, receive_after, times},
    progress,
    spec::{Console, Platform, Spec},
    terminal::Terminal,
};

/// The key that makes the next key a command to this program, and the command that ends the
/// program. Both are QEMU's own.
const ESCAPE: u8 = 1;
const QUIT: u8 = b'x';
/// Interval between two checks of the machines.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Delay before the receiving system ends, so that a person can read the token that `mercury
/// receive` prints.
const DELAY: &str = "2s";
/// Time limit for the destination to report that the machine runs on, after the source is off.
const GOES_ON_WITHIN: Duration = Duration::from_secs(20);
/// Size up to which the text of an unwatched console is kept.
const KEPT_BYTES: usize = 1 << 16;

/// Boots the machines and shows the shell, until the shell ends or is left.
///
/// # Errors
/// If there is no terminal, or a machine does not come up.
pub fn run(kernel: Kernel, cpus: u32, memory_mib: u32, on_terminal: fn(Spec) -> Spec) -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "Bochs has no network between machines" });
    }
    if !io::stdin().is_terminal() {
        return Err(Error::Host(
            "this is no terminal: run it in one, for it shows a shell to type into".into(),
        ));
    }
    say("Two machines, and a third one that is the switch between them and has their files");
    let switch = progress::step("the switch boots", || Switch::boot_for(kernel))?;
    let at = |place| {
        let spec = switch.plugged(kernel, cpus, memory_mib, place);
        spec.modules(Variant::Production).console(Console::Socket)
    };
    let other = progress::step("the destination boots", || switch.boot_other(at(3)))?;
    let line = progress::step("the destination waits", || await_machine(&other, 3))?;
    greet(&switch.peer, &line)?;
    let shell = on_terminal(at(2)).kernel_arg("lab.shell=1").kernel_arg("lab.pair=1");
    let machine = progress::step("the machine that moves boots", || switch.boot_moving(shell))?;
    say("This is its shell. Ctrl-A x ends all machines");
    show(machine, other, &at)
}

/// Starts `mercury receive` on a machine. Returns the command to type on the other machine.
fn await_machine(machine: &Machine, place: u8) -> Result<String> {
    let address = format!("10.9.0.1{place}");
    plug_in(machine, &address)?;
    Ok(format!("mercury migrate {} --without-tombstone", receive_after(machine, &address, DELAY)?))
}

/// Writes the first words of the shell into the machines' root.
fn greet(files: &Machine, line: &str) -> Result<()> {
    let text = format!(
        "Its root is another machine's, over NFS. A second machine waits for this one. Try:\n\n\
         \x20   sleep 1000 & echo $$\n\
         \x20   {line}\n\n\
         This machine moves with this shell: `jobs` and `echo $$` say the same afterwards. \
         The machine that was left\n\
         boots as the next destination, and the line for the way back is shown.\n\n"
    );
    files.put("/root/welcome", text.as_bytes(), 0o644)
}

/// Shows the shell on whichever machine runs it, until the shell ends or is left. `at` describes a
/// machine at a place of the switch.
fn show(mut machine: Machine, mut other: Machine, at: &impl Fn(u8) -> Spec) -> Result<()> {
    let terminal = Terminal::save();
    terminal.make_raw();
    let keys = Keys::default();
    keys.follow();
    let mut place = 2;
    let mut shown = Watched::begin(&machine)?;
    shown.show(&keys, "")?;
    loop {
        let hidden = Watched::begin(&other)?;
        let before = times(&other, GOES_ON);
        while !machine.is_off()? {
            if keys.are_over() || terminal.is_closed() {
                return Ok(());
            }
            thread::sleep(POLL_INTERVAL);
        }
        let arrived = || Ok((times(&other, GOES_ON) > before).then_some(()));
        if wait_for("the machine to go on", GOES_ON_WITHIN, arrived).is_err() {
            return Ok(());
        }
        hidden.show(&keys, GOES_ON)?;
        shown = hidden;
        std::mem::swap(&mut machine, &mut other);
        shown.print(
            "The machine has moved, and this is its shell. What it left boots as the next destination ...",
        )?;
        other = other.start_as(at(place))?;
        let line = await_machine(&other, place)?;
        shown.print(&format!("The way back:\r\n\r\n    {line}\r\n\r\nPress Return for a prompt."))?;
        place = if place == 2 { 3 } else { 2 };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A machine's console, which is read all the time. Its text is shown, or kept until it is shown.
struct Watched {
    stream: UnixStream,
    said: Arc<Mutex<Said>>,
}

#[derive(Default)]
struct Said {
    is_shown: bool,
    kept: Vec<u8>,
}

impl Watched {
    /// Connects to the console of a machine, and reads it from now on.
    fn begin(machine: &Machine) -> Result<Self> {
        let stream = machine.console()?;
        let mut reader = stream.try_clone().context(|| "read the machine's console".into())?;
        let said = Arc::<Mutex<Said>>::default();
        let to = Arc::clone(&said);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                lock(&to).hear(&bytes[..count]);
            }
        });
        Ok(Self { stream, said })
    }

    /// Shows the console's text from now on, and the kept text since the last line with `mark`.
    /// Keys go to the machine.
    fn show(&self, keys: &Keys, mark: &str) -> Result<()> {
        keys.go_to(self.stream.try_clone().context(|| "write to the machine's console".into())?);
        let mut said = lock(&self.said);
        said.is_shown = true;
        let kept = std::mem::take(&mut said.kept);
        put(after(&kept, mark))
    }

    /// Prints a note of this program's own between the machine's lines.
    fn print(&self, note: &str) -> Result<()> {
        let _said = lock(&self.said);
        put(format!("\r\n\x1b[1m==> {note}\x1b[0m\r\n").as_bytes())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Said {
    fn hear(&mut self, bytes: &[u8]) {
        if self.is_shown {
            let _ = put(bytes);
            return;
        }
        self.kept.extend_from_slice(bytes);
        let surplus = self.kept.len().saturating_sub(KEPT_BYTES);
        self.kept.drain(..surplus);
    }
}

fn put(bytes: &[u8]) -> Result<()> {
    let mut terminal = io::stdout().lock();
    terminal.write_all(bytes).and_then(|()| terminal.flush()).context(|| "write to this terminal".into())
}

/// Returns the text after the last line that contains `mark`, or the whole text if no line does.
fn after<'a>(text: &'a [u8], mark: &str) -> &'a [u8] {
    let found =
        (!mark.is_empty()).then(|| text.windows(mark.len()).rposition(|part| part == mark.as_bytes()));
    let Some(Some(at)) = found else { return text };
    let end = text[at..].iter().position(|&byte| byte == b'\n');
    end.map_or(&[], |end| &text[at + end + 1..])
}

/// The destination of the keys that are typed.
#[derive(Clone, Default)]
struct Keys(Arc<Mutex<Typed>>);

#[derive(Default)]
struct Typed {
    to: Option<UnixStream>,
    escaped: bool,
    is_over: bool,
}

impl Keys {
    /// Reads keys from now on.
    fn follow(&self) {
        let keys = self.clone();
        thread::spawn(move || {
            let mut bytes = [0; 256];
            while let Ok(count @ 1..) = io::stdin().read(&mut bytes) {
                lock(&keys.0).take(&bytes[..count]);
            }
            lock(&keys.0).is_over = true;
        });
    }

    fn go_to(&self, console: UnixStream) {
        lock(&self.0).to = Some(console);
    }

    /// Returns true if the machines are to end.
    fn are_over(&self) -> bool {
        lock(&self.0).is_over
    }
}

impl Typed {
    fn take(&mut self, typed: &[u8]) {
        let keys = self.meant(typed);
        if let Some(console) = &mut self.to {
            let _ = console.write_all(&keys);
        }
    }

    /// Returns the keys that are meant for the machine. The escape key makes the next key a
    /// command; typed twice it is itself.
    fn meant(&mut self, typed: &[u8]) -> Vec<u8> {
        let mut keys = Vec::new();
        for &key in typed {
            match (std::mem::take(&mut self.escaped), key) {
                (false, ESCAPE) => self.escaped = true,
                (true, QUIT) => self.is_over = true,
                _ => keys.push(key),
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_key_makes_a_command_of_the_next_one() {
        let mut typed = Typed::default();
        assert_eq!(typed.meant(b"ls\r"), b"ls\r");
        assert_eq!(typed.meant(&[ESCAPE, ESCAPE, b'a']), [ESCAPE, b'a']);
        assert!(!typed.is_over);
        assert_eq!(typed.meant(&[ESCAPE]), b"");
        assert_eq!(typed.meant(b"xy"), b"y");
        assert!(typed.is_over);
    }

    #[test]
    fn only_what_the_machine_says_after_its_arrival_is_shown() {
        assert_eq!(after(b"waiting\r\nmercury: going on here\r\n$ ", "going on"), b"$ ");
        assert_eq!(after(b"waiting\r\n", "going on"), b"waiting\r\n");
        assert_eq!(after(b"going on\nx\ngoing on", "going on"), b"");
        assert_eq!(after(b"text", ""), b"text");
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut said = Said::default();
        said.hear(&[b'a'; KEPT_BYTES]);
        said.hear(b"end");
        assert_eq!(said.kept.len(), KEPT_BYTES);
        assert!(said.kept.ends_with(b"aend"));
    }
}
