//! Orders at the control socket of `mercuryd`, and its answers at the client.

use crate::{Target, input::outcome};
use mercury_cli::daemon::order::{Answer, LINE_MAX, Order, printable};

pub const TARGET: Target = Target {
    name: "orders",
    run,
    seeds: || {
        [
            r#"{"order":"status"}"#,
            r#"{"order":"evacuate","reason":"ECC errors on DIMM 3\n"}"#,
            r#"{"state":"failed","reason":"x","to":"10.9.0.3","why":"y","refused":null,"busy":false}"#,
            r#"{"state":"waiting","refused":"no","busy":true}"#,
        ]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
    },
};

/// Returns the kind of an error, without the words of the input.
fn kind(error: &serde_json::Error) -> String {
    error.to_string().chars().take(14).collect()
}

fn run(input: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(&input[..input.len().min(LINE_MAX as usize)]) else { return 0 };
    let order = match serde_json::from_str::<Order>(text) {
        Ok(Order::Evacuate { reason }) => {
            let shown = printable(&reason);
            assert!(!shown.chars().any(char::is_control), "a control character reaches the journal");
            "evacuate".to_owned()
        }
        Ok(Order::Status {}) => "status".to_owned(),
        Err(error) => kind(&error),
    };
    let answer = match serde_json::from_str::<Answer>(text) {
        Ok(answer) => {
            let again = serde_json::to_string(&answer).expect("an answer in JSON");
            assert_eq!(serde_json::from_str::<Answer>(&again).expect("its own text"), answer);
            "an answer".to_owned()
        }
        Err(error) => kind(&error),
    };
    outcome(&format!("{order} {answer}"))
}
