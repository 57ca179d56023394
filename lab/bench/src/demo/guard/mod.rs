//! `make demo-guard`: a driver corrupts a machine's memory. The guard notices, the machine goes back to its
//! snapshot, and the post-mortem names the driver. A client outside sees one broken connection.

mod client;

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use self::client::{Account, Client};
use super::{Check, conclude, table, tell, try_next};
use mercury_lab::{
    command::patient,
    error::{Error, Result},
    host,
    kernel::Kernel,
    live::{Line, say},
    machine::Machine,
    markdown::thousands,
    progress, restart,
    restart::{check_chain, comes_further, count, script},
    spec::{Platform, Qemu, Spec},
};

/// Time of work before the driver stumbles, and after.
const AT_WORK: Duration = Duration::from_secs(5);
/// Limit for the machine to be back.
const BACK_WITHIN: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The guard's rules: each oops puts the machine back.
const RULES: &[u8] = b"on_oops = 'all'\n";

/// Keeps a snapshot. The script ends twice: the second end belongs to the life after the rollback. It reports
/// on the console, because the host cannot ask meanwhile.
const KEEP: &str = r#"
sleep 0.5
mercury snapshot --json > /run/said 2>&1
echo "<3>demo: $(tr -s ' \n' ' ' < /run/said)" > /dev/kmsg
"#;

/// The observations of the demonstration.
#[derive(Debug, Default)]
struct Seen {
    /// The report of the way back.
    rollback: Value,
    /// The output of `mercury postmortem --json`.
    postmortem: Value,
    account: Account,
    answered_before: u64,
    /// The client's longest waits: while the snapshot was made, and while the machine went back.
    waits: [Duration; 2],
    chain: Option<String>,
    snapshot_state: String,
    complaint: Option<String>,
}

/// Shows the demonstration.
///
/// # Errors
/// If the machine cannot be booted, does not go back, or anything was wrong after that.
pub(super) fn run() -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "this processor has no rollback in this version" });
    }
    say("A machine with stock Debian 12: building what is missing, then booting it");
    let port = host::free_port()?;
    let forward = format!("user,id=web,hostfwd=tcp:127.0.0.1:{port}-:80");
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(768).qemu_version(Qemu::Newer);
    let spec = ["-netdev", &forward, "-device", "virtio-net-pci,netdev=web,romfile="]
        .into_iter()
        .fold(spec, Spec::qemu_arg);
    let machine = Machine::boot(spec)?;
    let mut seen = Seen::default();
    prepare(&machine)?;
    let client = Client::start(port);
    die_and_live(&machine, &client, &mut seen)?;
    find_the_culprit(&machine, &client, &mut seen)?;
    drop(client);
    machine.shut_down()?;
    print(&seen);
    verdict(&seen)
}

/// Starts the work and the guard.
fn prepare(machine: &Machine) -> Result<()> {
    progress::step("starting a computation and a web service", || start_work(machine))?;
    say("insmod faulty.ko: a driver with a bug, which has not shown itself yet");
    machine.sh("insmod /mercury/lib/modules/$(uname -r)/faulty.ko")?;
    say("mercury guard on: each oops, each hang and each panic is noticed from now on");
    machine.put("/run/guard.toml", RULES, 0o644)?;
    tell(&machine.sh("mercury guard on --rules /run/guard.toml")?);
    Ok(())
}

fn start_work(machine: &Machine) -> Result<()> {
    machine.sh("modprobe virtio_net; card=$(ls -d /sys/class/net/*/device | cut -d/ -f5); \
         ip address add 10.0.2.15/24 dev $card; ip link set $card up; ip link set lo up")?;
    restart::start(machine, "chain", script::CHAIN, "")?;
    machine.put("/run/web.py", include_bytes!("web.py"), 0o644)?;
    machine.put("/run/keep", KEEP.as_bytes(), 0o755)?;
    // A machine whose local file systems are written to gets no snapshot.
    machine
        .sh("setsid python3 /run/web.py > /dev/null 2>&1 < /dev/null & sync; mount -o remount,ro /")
        .map(drop)
}

/// Keeps a snapshot, and lets the driver corrupt memory. Returns when the machine is back.
fn die_and_live(machine: &Machine, client: &Client, seen: &mut Seen) -> Result<()> {
    say("mercury snapshot: this instant is kept in memory");
    let before = machine.serial_log().len();
    machine.sh("setsid bash /run/keep > /dev/null 2>&1 < /dev/null &")?;
    let kept = said(machine, client, before, "kept")?;
    let memory = kept["memory"].as_u64().unwrap_or(0);
    println!("    kept: {} MiB of copies at most", memory >> 20);
    work(client, AT_WORK);
    say("Now the driver writes beyond its ring, over other objects of the kernel and its own pointer");
    seen.answered_before = client.account().answered;
    seen.waits[0] = client.take_longest();
    machine
        .sh("setsid sh -c 'sleep 0.5; echo 1 > /sys/module/faulty/parameters/stumble' > /dev/null 2>&1 &")?;
    seen.rollback = said(machine, client, before, "rolled-back")?;
    println!("    the machine is back: {}", seen.rollback["reason"].as_str().unwrap_or("?"));
    Ok(())
}

/// Asks the dead life for its cause, unloads the driver, and looks after the work.
fn find_the_culprit(machine: &Machine, client: &Client, seen: &mut Seen) -> Result<()> {
    say("mercury postmortem: the life that ended, in the machine that works again");
    tell(&machine.sh("mercury postmortem | sed '/the end of its log/,$d'")?);
    let text = machine.sh("mercury postmortem --json")?;
    seen.postmortem = serde_json::from_str(&text).map_err(|error| Error::Host(format!("{error}: {text}")))?;
    say("rmmod faulty: the driver goes, the machine stays");
    machine.sh("rmmod faulty")?;
    comes_further(machine, "chain", count(machine, "chain")?)?;
    work(client, AT_WORK);
    seen.account = client.account();
    seen.waits[1] = client.take_longest();
    let state = machine.mercury("status")?["snapshot"]["state"].as_str().unwrap_or("none").to_owned();
    seen.snapshot_state = state;
    seen.chain = restart::results(machine, &["chain"])?.into_iter().next();
    seen.complaint = machine.check_log().err().map(|error| error.to_string());
    Ok(())
}

/// Waits until the script reports this state.
fn said(machine: &Machine, client: &Client, before: usize, state: &str) -> Result<Value> {
    let (begun, mut line) = (Instant::now(), Line::begin());
    while begun.elapsed() < patient(BACK_WITHIN) {
        let log = machine.serial_log();
        let reports =
            log.get(before..).unwrap_or_default().split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let mut reports = reports.filter_map(|line| serde_json::from_str(line.split_once("demo: ")?.1).ok());
        if let Some(report) = reports.next_back().filter(|report: &Value| report["state"] == state) {
            return Ok(report);
        }
        if machine.is_off()? {
            break;
        }
        line.show(&progress_of(client));
        thread::sleep(POLL_INTERVAL);
    }
    Err(machine.blame(Error::Host(format!("the machine did not say `{state}`"))))
}

/// Shows the client's progress for a while.
fn work(client: &Client, time: Duration) {
    let (begun, mut line) = (Instant::now(), Line::begin());
    while begun.elapsed() < time {
        line.show(&progress_of(client));
        thread::sleep(POLL_INTERVAL);
    }
}

fn progress_of(client: &Client) -> String {
    let account = client.account();
    format!("{} requests answered, {} connections broken", account.answered, account.broken)
}

impl Seen {
    fn number(&self, key: &str) -> f64 {
        self.rollback[key].as_f64().unwrap_or(0.0)
    }

    /// Returns the seconds from the rendezvous's begin until memory was put back and CPUs went on.
    fn back_s(&self) -> f64 {
        (self.number("meet_us") + self.number("work_us")) / 1e6
    }

    /// Returns the driver's function on a stack of the life that ended.
    fn culprit(&self) -> Option<String> {
        let cpus = self.postmortem["cpus"].as_array()?;
        let mut calls =
            cpus.iter().filter_map(|cpu| cpu["calls"].as_array()).flatten().filter_map(Value::as_str);
        calls.find(|call| call.ends_with("[faulty]")).map(str::to_owned)
    }
}

fn print(seen: &Seen) {
    let mut table = table(&["", "measured"]);
    let ms = |seconds: f64| format!("{:.0} ms", seconds * 1e3);
    let rows = [
        ("from the oops to the second life", ms(seen.back_s())),
        ("pages that were put back", thousands(seen.number("pages") as u64)),
        ("work that was lost", format!("{:.1} s", seen.postmortem["lived_s"].as_f64().unwrap_or(0.0))),
        ("requests that were answered", thousands(seen.account.answered)),
        ("connections that broke", seen.account.broken.to_string()),
        ("longest wait of the client, while the snapshot was made", ms(seen.waits[0].as_secs_f64())),
        ("longest wait of the client, while the machine went back", ms(seen.waits[1].as_secs_f64())),
    ];
    rows.into_iter().for_each(|(what, measured)| {
        table.add_row([what.to_owned(), measured]);
    });
    println!("\n{table}\n\nThe machine is emulated: hardware is far quicker.");
}

/// # Errors
/// If anything was lost or wrong.
fn verdict(seen: &Seen) -> Result<()> {
    let chain = seen.chain.as_deref().unwrap_or_default();
    let links = chain.split(' ').next().and_then(|links| links.parse().ok()).unwrap_or(0);
    let account = seen.account;
    let checks = [
        Check::new(
            seen.rollback["reason"] == "oops",
            "the guard noticed the oops, and the machine went back",
        ),
        Check::new(seen.back_s() < 1.0, format!("it was back in less than a second: {:.3} s", seen.back_s())),
        Check::new(
            seen.culprit().is_some(),
            format!("the post-mortem names the driver: {}", seen.culprit().unwrap_or_default()),
        ),
        Check::new(
            links > 0 && check_chain(chain).is_ok(),
            format!("the computation went on, and all its {} hashes are right", thousands(links)),
        ),
        Check::new(
            account.answered > seen.answered_before && account.broken == 1,
            format!("the client saw one broken connection, and {} answers", thousands(account.answered)),
        ),
        Check::new(
            seen.snapshot_state == "kept",
            "the snapshot is still there: the next death goes back, too",
        ),
        Check::new(seen.complaint.is_none(), "the kernel that runs now has no complaint"),
    ];
    conclude(&checks, seen.complaint.as_deref())?;
    try_next(&[
        (
            "make campaign COUNT=20",
            "faults of all kinds into such a machine, and a table of what came of them",
        ),
        (
            "make shell",
            "by hand: mercury snapshot, then echo c > /proc/sysrq-trigger, then mercury postmortem",
        ),
        ("docs/guard.md", "how to guard your own machines, and what a rollback loses"),
    ]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The links that a chain of one hash has.
    const CHAIN: &str = "1 66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925";

    fn seen() -> Seen {
        Seen {
            rollback: json!({ "reason": "oops", "meet_us": 900.0, "work_us": 80_000.0, "pages": 5000 }),
            postmortem: json!({ "lived_s": 5.5, "cpus": [
                { "calls": ["default_idle+0x9"] },
                { "calls": ["mercury_rollback+0x10 [mercury]", "faulty_poll+0x2c [faulty]"] },
            ] }),
            account: Account { answered: 100, broken: 1, longest: Duration::from_millis(700) },
            answered_before: 50,
            waits: [Duration::from_millis(900), Duration::from_millis(700)],
            chain: Some(CHAIN.into()),
            snapshot_state: "kept".into(),
            complaint: None,
        }
    }

    #[test]
    fn whatever_is_wrong_breaks_a_promise() {
        assert!(verdict(&seen()).is_ok());
        assert_eq!(seen().culprit().as_deref(), Some("faulty_poll+0x2c [faulty]"));
        let account = seen().account;
        let wrong = [
            Seen { rollback: json!({ "reason": "panic", "work_us": 1.0 }), ..seen() },
            Seen { rollback: json!({ "reason": "oops", "work_us": 1e6 }), ..seen() },
            Seen { postmortem: json!({ "cpus": [{ "calls": ["default_idle+0x9"] }] }), ..seen() },
            Seen { chain: Some("1 00".into()), ..seen() },
            Seen { account: Account { broken: 2, ..account }, ..seen() },
            Seen { answered_before: 100, ..seen() },
            Seen { snapshot_state: "lost".into(), ..seen() },
            Seen { complaint: Some("BUG".into()), ..seen() },
        ];
        assert!(wrong.iter().all(|seen| verdict(seen).is_err()));
    }
}
