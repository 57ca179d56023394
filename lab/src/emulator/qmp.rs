//! QEMU's monitor: a small client of QMP, the JSON protocol on a Unix socket, one message a line.
//!
//! QEMU greets with `{"QMP": …}` and takes commands after `qmp_capabilities`. It answers each command
//! with `{"return": …}` or `{"error": {"class": …, "desc": …}}`, in order; events come in between.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    error::{Context, Error, Result, wait_for},
    scene::Scene,
};

/// Time limit of QEMU's answer. Saving a machine is the longest command that the lab gives.
const ANSWER_LIMIT: Duration = Duration::from_secs(180);

/// One message from QEMU.
#[derive(Clone, Debug, PartialEq)]
enum Message {
    Greeting,
    Return(Value),
    Error(String),
    Event(Event),
}

/// An event that QEMU reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// `SHUTDOWN`, `RESET`, `GUEST_PANICKED` …
    pub name: String,
    pub data: Value,
}

impl Message {
    fn parse(line: &str) -> Option<Self> {
        let mut value: Value = serde_json::from_str(line).ok()?;
        let object = value.as_object_mut()?;
        if let Some(answer) = object.remove("return") {
            return Some(Self::Return(answer));
        }
        if let Some(error) = object.get("error") {
            return Some(Self::Error(error["desc"].as_str().unwrap_or("no reason given").to_owned()));
        }
        if let Some(name) = object.get("event").and_then(Value::as_str) {
            let name = name.to_owned();
            let data = object.remove("data").unwrap_or(Value::Null);
            return Some(Self::Event(Event { name, data }));
        }
        object.contains_key("QMP").then_some(Self::Greeting)
    }
}

#[derive(Debug, Default)]
struct Events {
    seen: Mutex<Vec<Event>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Line {
    socket: UnixStream,
    answers: Receiver<Message>,
}

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    line: Mutex<Line>,
    events: Arc<Events>,
    scene: Option<Arc<Scene>>,
}

impl Qmp {
    /// Shakes hands on a connected socket. `scene` has what QEMU leaves behind when it ends.
    ///
    /// # Errors
    /// If QEMU does not greet.
    pub fn new(socket: UnixStream, scene: Option<Arc<Scene>>) -> Result<Self> {
        let reader = socket.try_clone().context(|| "share the monitor's socket".into())?;
        let (sender, answers) = channel();
        let events = Arc::new(Events::default());
        let shared = Arc::clone(&events);
        thread::spawn(move || listen(reader, &sender, &shared));
        let qmp = Self { line: Mutex::new(Line { socket, answers }), events, scene };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command of QMP's.
    ///
    /// # Errors
    /// If QEMU refuses, or does not answer.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let request = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        line.socket.write_all(request.as_bytes()).map_err(|_| self.gone(command))?;
        loop {
            match line.answers.recv_timeout(ANSWER_LIMIT) {
                Ok(Message::Return(value)) => return Ok(value),
                Ok(Message::Error(answer)) => {
                    return Err(Error::Monitor { command: command.to_owned(), answer });
                }
                Ok(_) => {}
                Err(_) => return Err(self.gone(command)),
            }
        }
    }

    fn gone(&self, command: &str) -> Error {
        let error = Error::Gone(format!("asking QEMU to {command}"));
        match &self.scene {
            Some(scene) => scene.blame(error),
            None => error,
        }
    }

    /// Executes a command of the monitor for people. Its answer is text, and so are errors.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn human(&self, command: &str) -> Result<String> {
        let answer = self.execute("human-monitor-command", json!({"command-line": command}))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    /// Executes a command for people whose success is silence.
    fn human_silent(&self, command: &str) -> Result<()> {
        let answer = self.human(command)?;
        if answer.trim().is_empty() {
            return Ok(());
        }
        Err(Error::Monitor { command: command.to_owned(), answer: answer.trim().to_owned() })
    }

    /// Injects a non-maskable interrupt, on CPU 0.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn inject_nmi(&self) -> Result<()> {
        self.execute("inject-nmi", json!({})).map(drop)
    }

    /// Injects a machine-check error into a bank of one CPU.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn inject_mce(&self, mce: &MachineCheck) -> Result<()> {
        let MachineCheck { cpu, bank, status, mcg_status, address, misc } = mce;
        self.human_silent(&format!("mce {cpu} {bank} {status:#x} {mcg_status:#x} {address:#x} {misc:#x}"))
    }

    /// Plugs one more CPU in. Returns the CPU's name for [`Qmp::cpu_del`]. Linux sees the CPU, and
    /// has to bring it online.
    ///
    /// # Errors
    /// If the machine has no room for the CPU.
    pub fn cpu_add(&self) -> Result<String> {
        let slots = self.cpu_slots()?;
        let mut free = slots.iter().filter(|slot| slot.get("qom-path").is_none());
        let slot = free.next_back().ok_or_else(|| Error::Monitor {
            command: "cpu_add".to_owned(),
            answer: "the machine has no free place for a CPU".to_owned(),
        })?;
        let mut device = slot["props"].clone();
        let id = format!("cpu-{}-{}", device["socket-id"], device["core-id"]);
        device["id"] = json!(id);
        device["driver"] = slot["type"].clone();
        self.execute("device_add", device)?;
        Ok(id)
    }

    /// Removes a CPU that was plugged in. The guest is asked and has to agree. Best done last: QEMU
    /// 7.2's emulation damages its own heap when a CPU is added after a removal.
    ///
    /// # Errors
    /// If the guest does not release the CPU within `limit`.
    pub fn cpu_del(&self, id: &str, limit: Duration) -> Result<()> {
        self.execute("device_del", json!({"id": id}))?;
        // The event DEVICE_DELETED is sent for the CPU's local APIC only.
        let path = format!("/machine/peripheral/{id}");
        wait_for("the CPU to be let go", limit, || {
            let there = self.cpu_slots()?.iter().any(|slot| slot["qom-path"] == path.as_str());
            Ok((!there).then_some(()))
        })
    }

    fn cpu_slots(&self) -> Result<Vec<Value>> {
        let mut slots = self.execute("query-hotpluggable-cpus", json!({}))?;
        Ok(slots.as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Saves the whole machine into its disks. QEMU cannot save NVMe.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn savevm(&self, name: &str) -> Result<()> {
        self.human_silent(&format!("savevm {name}"))
    }

    /// Restores the saved state of the machine.
    ///
    /// # Errors
    /// If there is no such state, or QEMU refuses.
    pub fn loadvm(&self, name: &str) -> Result<()> {
        self.human_silent(&format!("loadvm {name}"))
    }

    /// Moves the machine to a waiting QEMU. Returns the last answer of `query-migrate`.
    ///
    /// # Errors
    /// If the migration does not complete.
    pub fn migrate(&self, uri: &str) -> Result<Value> {
        self.execute("migrate", json!({"uri": uri}))?;
        wait_for("QEMU to move the machine", ANSWER_LIMIT, || {
            let said = self.execute("query-migrate", json!({}))?;
            match said["status"].as_str() {
                Some("completed") => Ok(Some(said)),
                Some("failed" | "cancelled") => {
                    Err(Error::Monitor { command: "migrate".to_owned(), answer: said.to_string() })
                }
                _ => Ok(None),
            }
        })
    }

    /// Presses the reset button.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn system_reset(&self) -> Result<()> {
        self.execute("system_reset", json!({})).map(drop)
    }

    /// Presses the power button.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn system_powerdown(&self) -> Result<()> {
        self.execute("system_powerdown", json!({})).map(drop)
    }

    /// Wakes the machine from suspend.
    ///
    /// # Errors
    /// If the machine is not suspended.
    pub fn system_wakeup(&self) -> Result<()> {
        self.execute("system_wakeup", json!({})).map(drop)
    }

    /// Stops all CPUs where they are.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn stop(&self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Lets stopped CPUs go on.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn cont(&self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Returns QEMU's state of the machine: `running`, `paused`, `suspended`, `guest-panicked` …
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn status(&self) -> Result<String> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns all events so far.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.events.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for an event since the start of the machine.
    ///
    /// # Errors
    /// If the event does not come within `limit`.
    pub fn wait_event(&self, name: &str, limit: Duration) -> Result<Event> {
        let end = Instant::now() + limit;
        let mut seen = self.events.seen.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(event) = seen.iter().find(|event| event.name == name) {
                return Ok(event.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { what: format!("QEMU's event {name}"), limit });
            }
            let waited = self.events.changed.wait_timeout(seen, left);
            seen = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A machine-check error to inject, in the form of its bank's registers.
#[derive(Clone, Copy, Debug, Default)]
pub struct MachineCheck {
    /// The CPU's index.
    pub cpu: u32,
    pub bank: u32,
    /// `MCi_STATUS`.
    pub status: u64,
    /// `MCG_STATUS`.
    pub mcg_status: u64,
    /// `MCi_ADDR`.
    pub address: u64,
    /// `MCi_MISC`.
    pub misc: u64,
}

fn listen(socket: UnixStream, answers: &Sender<Message>, events: &Events) {
    for line in BufReader::new(socket).lines() {
        let Ok(line) = line else { return };
        match Message::parse(&line) {
            Some(Message::Event(event)) => {
                events.seen.lock().unwrap_or_else(PoisonError::into_inner).push(event);
                events.changed.notify_all();
            }
            Some(message) => {
                let _ = answers.send(message);
            }
            None => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        assert_eq!(
            Message::parse(r#"{"QMP": {"version": {}, "capabilities": []}}"#),
            Some(Message::Greeting)
        );
        assert_eq!(Message::parse(r#"{"return": {"a": 1}}"#), Some(Message::Return(json!({"a": 1}))));
        assert_eq!(
            Message::parse(r#"{"error": {"class": "GenericError", "desc": "no"}}"#),
            Some(Message::Error("no".into()))
        );
        assert_eq!(
            Message::parse(r#"{"timestamp": {"seconds": 1}, "event": "RESET", "data": {"guest": true}}"#),
            Some(Message::Event(Event { name: "RESET".into(), data: json!({"guest": true}) }))
        );
        assert_eq!(Message::parse("{}"), None);
        assert_eq!(Message::parse("nonsense"), None);
    }

    /// Plays QEMU's part: greets, then answers every line with the next of `answers`.
    fn play(socket: UnixStream, answers: &'static [&'static str]) {
        thread::spawn(move || {
            let mut writer = socket.try_clone().unwrap();
            writer.write_all(b"{\"QMP\": {}}\n").unwrap();
            for (_, answer) in BufReader::new(socket).lines().zip(answers) {
                writer.write_all(answer.as_bytes()).unwrap();
            }
        });
    }

    #[test]
    fn events_between_answers_are_kept() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        play(
            theirs,
            &["{\"return\": {}}\n", "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"paused\"}}\n"],
        );
        let qmp = Qmp::new(ours, None).unwrap();
        assert_eq!(qmp.status().unwrap(), "paused");
        assert_eq!(qmp.wait_event("STOP", Duration::ZERO).unwrap().data, Value::Null);
        assert!(matches!(qmp.wait_event("RESET", Duration::ZERO), Err(Error::Timeout { .. })));
    }

    #[test]
    fn errors_name_the_command() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        play(theirs, &["{\"return\": {}}\n", "{\"return\": \"Error: no such state\\r\\n\"}\n"]);
        let error = Qmp::new(ours, None).unwrap().loadvm("x").unwrap_err();
        assert_eq!(error.to_string(), "QEMU refuses loadvm x: Error: no such state");
    }
}
