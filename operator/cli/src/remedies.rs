//! A test of all crates that talk to the operator: every failure says what to do.

/// The crates with errors that the operator reads.
const CRATES: [&str; 11] = [
    "switch/control",
    "relocate/quiesce",
    "relocate/relocation",
    "relocate/guest",
    "operator/cli",
    "operator/guest",
    "operator/hosted",
    "hosted/afterburner",
    "hosted/devices",
    "hosted/runtime",
    "hosted/subnet",
];

/// Lists the source files of the command that may have messages for users.
fn sources(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let of_tests = ["tests.rs", "trial.rs", "hostile.rs", "turns.rs", "remedies.rs"];
    let is_source = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.ends_with(".rs") && !of_tests.contains(&name.as_str())
    };
    files.into_iter().filter(is_source).chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

/// Returns the text after the parenthesis that is open at the beginning.
fn after_the_call(text: &str) -> &str {
    let mut depth = 1;
    let end = text.find(|character| {
        depth += i32::from(character == '(') - i32::from(character == ')');
        depth == 0
    });
    end.map_or("", |end| &text[end + 1..])
}

/// Returns the arguments of the call whose parenthesis is open at the beginning.
fn message_of(text: &str) -> &str {
    &text[..text.len() - after_the_call(text).len()]
}

/// Every failure says what to do, except one that the operator has asked for by Ctrl-C.
#[test]
fn every_failure_says_what_to_do() {
    // The gdb stub and the guest have remedies of their own. Messages about a test's table
    // reach no user.
    const EXCEPT: [&str; 3] = ["error.message()", "\"a table has no disks\"", "\"a table goes nowhere\""];
    let mut wanting = Vec::new();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for path in CRATES.iter().flat_map(|folder| sources(&root.join(folder).join("src"))) {
        let text = std::fs::read_to_string(&path).expect("a source");
        let text = text.split("mod tests {").next().unwrap_or_default();
        for (at, call) in text.match_indices("Error::new(") {
            let before = &text[..at];
            let arguments = &text[at + call.len()..];
            // `io::Error` is another type, and the functions of this file give hints if they
            // can.
            let other = before.ends_with("io::") || path.ends_with("control/src/error.rs");
            let spared = arguments.trim_start().starts_with("Exit::Interrupted")
                || EXCEPT.iter().any(|words| arguments[..arguments.len().min(80)].contains(words))
                || message_of(arguments).contains("this is a bug");
            let rest = after_the_call(arguments);
            let follows = rest.trim_start_matches([')', '}', ';', ' ', '\n']);
            let line = before.rsplit('\n').next().unwrap_or_default();
            let name = line.trim().strip_prefix("let ").and_then(|line| line.split(' ').next());
            let later =
                name.is_some_and(|name| rest[..rest.len().min(400)].contains(&format!("{name}.hint(")));
            let adds =
                [".hint(", ".map_err(|error| error.hint("].iter().any(|call| follows.starts_with(call));
            if !other && !spared && !adds && !later {
                wanting.push(format!("{}:{}", path.display(), before.matches('\n').count() + 1));
            }
        }
    }
    assert!(wanting.is_empty(), "these say nothing of what to do: {wanting:#?}");
}
