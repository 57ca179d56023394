//! Machines on a subnet (`--net subnet=`): they reach each other and nothing else, and the death of one harms
//! no other.

use std::process::Output;

use super::*;

/// A server that reads a stream to its end, and says its hash.
const SERVER: &str = "python3 -c 'import socket, hashlib; l = socket.create_server((\"\", 8080)); \
     print(\"list\" + \"ening\", flush=True); s = l.accept()[0]; h = hashlib.sha256(); n = 0\n\
     while b := s.recv(1 << 20): h.update(b); n += len(b)\n\
     print(\"got\", n, h.hexdigest(), flush=True)'";

/// Returns the line by which a machine sends a stream of so many MiB, and says its hash.
fn client(address: &str, mib: usize) -> String {
    format!(
        "python3 -c 'import socket, hashlib, os; s = socket.create_connection((\"{address}\", 8080)); \
         h = hashlib.sha256(); b = os.urandom(1 << 20)\n\
         for n in range({mib}): c = b[n:] + b[:n]; h.update(c); s.sendall(c)\n\
         s.close(); print(\"sent\", {mib} << 20, h.hexdigest(), flush=True)'"
    )
}

/// Machines that share a disk which none writes to, and a folder for subnets.
struct Machines {
    place: Place,
    disk: PathBuf,
    run: PathBuf,
    count: usize,
}

impl Machines {
    fn new() -> Result<Self> {
        let place = Place::new("subnet")?;
        let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
        let run = place.directory.join("run");
        fs::create_dir(&run).expect("a folder");
        give_to_nobody(&run);
        fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).expect("its rights");
        Ok(Self { place, disk, run, count: 0 })
    }

    /// Starts a machine with a card on a subnet, at 10.9.0.NUMBER.
    fn start(&mut self, subnet: &str, number: usize, isolation: &str) -> Machine {
        self.start_with(subnet, number, &[isolation])
    }

    fn start_with(&mut self, subnet: &str, number: usize, options: &[&str]) -> Machine {
        let disk = format!("{},ro", self.disk.display());
        let mut command = self.place.run();
        command.env("XDG_RUNTIME_DIR", &self.run).args(["--disk", &disk, "--memory", "256"]).args(options);
        command.args(["--net", &format!("subnet={subnet}")]);
        command.args(["--append", "root=/dev/vda ro init=/bin/sh"]);
        self.count += 1;
        let mut machine =
            Machine::with_log(&mut command, &self.place.directory.join(format!("log-{}", self.count)));
        machine.wait_for("Run /bin/sh as init");
        machine.type_line(&format!("PS1=; PS2=; {SHELL}"));
        machine.wait_for("ready\n");
        machine.type_line(&format!(
            "mount -t tmpfs t /tmp; ip address add 10.9.0.{number}/24 dev eth0; ip link set eth0 up; \
             echo set u''p $(cat /sys/class/net/eth0/mtu)"
        ));
        machine.wait_for("set up 65521\n");
        machine
    }

    /// Returns the output of `mercury hosted net` as the user of the machines.
    fn list(&self) -> Output {
        let mut command = as_nobody(&self.place.command);
        command
            .env("XDG_RUNTIME_DIR", &self.run)
            .args(["--json", "hosted", "net"])
            .output()
            .expect("the command")
    }

    /// Waits until so many machines are on subnets.
    fn wait_for_members(&self, count: usize) {
        let start = Instant::now();
        loop {
            let said = String::from_utf8_lossy(&self.list().stdout).into_owned();
            if said.matches("\"pid\"").count() == count {
                return;
            }
            assert!(start.elapsed() < patient(LIMIT), "not {count} machines: {said}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Pings a machine from another one, with short and with long packets.
fn ping(from: &mut Machine, number: usize, mark: &str) {
    // It may have pinged the same machine before.
    let before = from.said().len();
    from.type_line(&format!(
        "to='-n -c 3 -i 0.2 -W 20 10.9.0.{number}'; ping $to; ping -s 60000 -M do $to; \
         echo pinged {mark}''."
    ));
    from.wait_for(&format!("pinged {mark}.\n"));
    let said = from.said();
    let now = said.get(before..).unwrap_or_default();
    let answers = between(now, &format!("PING 10.9.0.{number}"), &format!("pinged {mark}.\n"));
    assert_eq!(answers.matches("3 packets transmitted, 3 received").count(), 2, "{said}");
}

/// Waits until a machine has said something so many times.
fn await_times(machine: &Machine, text: &str, times: usize) {
    let start = Instant::now();
    while machine.said().matches(text).count() < times {
        assert!(start.elapsed() < patient(LIMIT), "no {text:?}: {}", machine.said());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the last line that a machine has said which begins with a word, as a stream's length and hash.
fn stream(machine: &mut Machine, word: &str) -> String {
    machine.wait_for(&format!("\n{word} "));
    let said = machine.said();
    let line =
        said.lines().rev().find(|line| line.starts_with(&format!("{word} "))).expect("the line").to_owned();
    line[word.len()..].to_owned()
}

/// Sends a stream from one machine to the other, and compares.
fn send(from: &mut Machine, to: &mut Machine, number: usize, mib: usize) {
    to.type_line(SERVER);
    to.wait_for("listening\n");
    from.type_line(&client(&format!("10.9.0.{number}"), mib));
    let (sent, got) = (stream(from, "sent"), stream(to, "got"));
    assert_eq!(sent, got);
}

fn power_off(mut machine: Machine) {
    machine.type_line("poweroff -f");
    assert_well(&machine.end(HALTED));
}

/// Two machines, with each isolation and with both: pings, and a stream in each direction.
#[test]
#[ignore = "long"]
fn two_machines_talk_on_a_subnet() -> Result<()> {
    const MIB: usize = 192;
    let mut machines = Machines::new()?;
    for pair in [[0, 0], [1, 1], [0, 1]] {
        let mut a = machines.start("lab", 1, ISOLATIONS[pair[0]]);
        let mut b = machines.start("lab", 2, ISOLATIONS[pair[1]]);
        machines.wait_for_members(2);
        ping(&mut a, 2, "two");
        send(&mut a, &mut b, 2, MIB);
        let mut c = machines.start_with("lab", 3, &[ISOLATIONS[pair[1]], "--no-rewrite"]);
        send(&mut c, &mut a, 1, MIB);
        assert_no_rings(&a);
        [a, b, c].into_iter().for_each(power_off);
        machines.wait_for_members(0);
    }
    // The keeper has ended, and has left no socket.
    let left = fs::read_dir(machines.run.join("mercury/subnets")).expect("the folder").flatten();
    assert!(left.into_iter().all(|entry| entry.path().extension().is_none_or(|kind| kind != "socket")));
    Ok(())
}

/// Checks that no process of a machine has the file of all rings open: with it, a program that gets past the
/// monitor could read what others send to each other.
fn assert_no_rings(machine: &Machine) {
    for process in family(machine.child.id()) {
        let Ok(files) = fs::read_dir(format!("/proc/{process}/fd")) else { continue };
        for file in files.flatten() {
            let is_rings =
                fs::read_link(file.path()).is_ok_and(|to| to.to_string_lossy().contains("subnet-rings"));
            assert!(!is_rings, "{}", file.path().display());
        }
    }
}

/// Returns a process and all that it has started.
fn family(process: u32) -> Vec<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = fs::read_to_string(path).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    std::iter::once(process).chain(children.flat_map(family)).collect()
}

/// Kills machines that others talk to, and that talk: a stream between two others arrives, the killed one's
/// place is free, and a new machine takes it.
#[test]
#[ignore = "long"]
fn a_killed_machine_harms_no_other_on_its_subnet() -> Result<()> {
    const MIB: usize = 256;
    let mut machines = Machines::new()?;
    for isolation in ISOLATIONS {
        let mut a = machines.start("deaths", 1, isolation);
        let mut b = machines.start("deaths", 2, isolation);
        for round in 0..3 {
            let mut c = machines.start("deaths", 3, isolation);
            ping(&mut a, 3, &format!("c{round}"));
            // The killed one receives from one machine and sends to the other.
            c.type_line("ping -q -f -s 30000 10.9.0.2 >/dev/null & ");
            a.type_line("ping -q -f -s 30000 10.9.0.3 >/dev/null & flood=$!");
            let times = round as usize + 1;
            b.type_line(SERVER);
            await_times(&b, "\nlistening\n", times);
            a.type_line(&client("10.9.0.2", MIB));
            thread::sleep(Duration::from_millis(100 + 150 * round));
            drop(c);
            await_times(&a, "\nsent ", times);
            await_times(&b, "\ngot ", times);
            let sent = stream(&mut a, "sent");
            assert_eq!(stream(&mut b, "got"), sent);
            machines.wait_for_members(2);
            a.type_line("kill $flood; wait $flood");
        }
        ping(&mut a, 2, "last");
        [a, b].into_iter().for_each(power_off);
        machines.wait_for_members(0);
    }
    Ok(())
}

/// A machine of another subnet hears nothing and is not heard, at the same address. A machine that stands
/// still holds up none. After the keeper was killed, machines go on, and no other can join.
#[test]
#[ignore = "long"]
fn subnets_are_apart_and_go_on_without_their_keeper() -> Result<()> {
    let mut machines = Machines::new()?;
    let mut a = machines.start("apart", 1, ISOLATIONS[0]);
    let mut stranger = machines.start("other", 2, ISOLATIONS[0]);
    for (machine, number) in [(&mut a, 2), (&mut stranger, 1)] {
        machine.type_line(&format!("ping -n -c 3 -i 0.2 -W 1 10.9.0.{number}; echo tri''ed"));
        machine.wait_for("tried\n");
        assert!(machine.said().contains("3 packets transmitted, 0 received"), "{}", machine.said());
        machine.type_line("cat /sys/class/net/eth0/statistics/rx_packets; echo coun''ted");
        machine.wait_for("\n0\ncounted\n");
    }
    let mut b = machines.start("apart", 2, ISOLATIONS[1]);
    let c = machines.start("apart", 3, ISOLATIONS[0]);
    ping(&mut a, 3, "c");
    let stopped = Pid::from_raw(c.child.id().cast_signed()).expect("a process");
    kill_process(stopped, Signal::STOP).expect("a signal");
    a.type_line("ping -q -f -c 3000 -s 60000 10.9.0.3 >/dev/null & ");
    send(&mut a, &mut b, 2, 64);
    kill_process(stopped, Signal::CONT).expect("a signal");
    let keeper = Command::new("pgrep").args(["-f", "keep-subnet apart$"]).output().expect("pgrep");
    let keeper = String::from_utf8_lossy(&keeper.stdout).trim().parse().ok().and_then(Pid::from_raw);
    kill_process(keeper.expect("one keeper"), Signal::KILL).expect("a signal");
    ping(&mut b, 1, "orphans");
    let mut command = machines.place.run();
    command.env("XDG_RUNTIME_DIR", &machines.run).args(["--net", "subnet=apart"]).stdin(Stdio::null());
    let refused = command.output().expect("the command");
    assert_eq!(refused.status.code(), UNFIT, "{refused:?}");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("keeper of subnet apart was ended"),
        "{refused:?}"
    );
    [a, b, c, stranger].into_iter().for_each(power_off);
    Ok(())
}
