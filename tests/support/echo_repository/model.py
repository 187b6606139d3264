"""A model that echoes its prompt word by word through the text contract: one word is one token.

It lets the client be tested on a real tritonserver without torch, weights or a tokenizer. A prompt that begins with `!`
asks for something else than an echo:

    !error TEXT        answered with the error TEXT (INVALID_ARG)
    !late TEXT         the first word of TEXT, then the error "late failure"
    !slow TEXT         TEXT at 20 words a second
    !endless           words without end, until cancelled, timed out or max_tokens
    !request           the request as it arrived, as JSON
    !cancelled         the prompts of the requests that were cancelled so far, one a line
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

SLOW_SECONDS_PER_WORD = 0.05
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._is_batched = config["max_batch_size"] > 0
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._cancelled = []

    def execute(self, requests):
        if not self._is_decoupled:
            return [self._answer_whole(EchoRequest(request)) for request in requests]
        for request in requests:
            echo = EchoRequest(request)
            threading.Thread(target=self._answer, args=(echo, request.get_response_sender())).start()
        return None

    def _answer(self, echo, sender):
        try:
            if echo.is_streamed:
                for words, finish_reason in self._steps(echo, sender.is_cancelled):
                    sender.send(self._response(echo, words, finish_reason))
            else:
                sender.send(self._answer_whole(echo, sender.is_cancelled), FINAL)
                return
        except pb_utils.TritonModelException as error:
            sender.send(pb_utils.InferenceResponse(error=error.args[0]), FINAL)
        else:
            sender.send(flags=FINAL)

    def _answer_whole(self, echo, is_cancelled=lambda: False):
        try:
            steps = list(self._steps(echo, is_cancelled))
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=error.args[0])
        words = [word for new_words, _ in steps for word in new_words]
        return self._response(echo, words, finish_reason=steps[-1][1])

    def _steps(self, echo, is_cancelled):
        """Yields (new words, finish reason or None); raises what the prompt asks for."""
        for num_sent, word in enumerate(self._words(echo), 1):
            if is_cancelled():
                self._cancelled.append(echo.text)
                raise failure("cancelled", pb_utils.TritonError.CANCELLED)
            if echo.deadline is not None and time.monotonic() > echo.deadline:
                raise failure("deadline passed", pb_utils.TritonError.UNAVAILABLE)
            if num_sent == echo.max_tokens:
                yield [word], "length"
                return
            yield [word], None
        yield [], "stop"

    def _words(self, echo):
        command, _, rest = echo.text.partition(" ")
        if command == "!error":
            raise failure(rest, pb_utils.TritonError.INVALID_ARG)
        if command == "!request":
            yield json.dumps(echo.as_received)
        elif command == "!cancelled":
            yield "\n".join(self._cancelled)
        elif command == "!endless":
            while True:
                yield "word "
                time.sleep(SLOW_SECONDS_PER_WORD)
        else:
            for word in (rest if command in ("!slow", "!late") else echo.text).split():
                yield word + " "
                if command == "!slow":
                    time.sleep(SLOW_SECONDS_PER_WORD)
                if command == "!late":
                    raise failure("late failure", pb_utils.TritonError.INTERNAL)

    def _response(self, echo, words, finish_reason):
        num_answers = echo.sampling.get("n", 1)
        text = "".join(words)
        outputs = {
            "text_output": strings([text] * num_answers),
            "finish_reason": strings([str(finish_reason)] * num_answers),
            "num_input_tokens": np.array([len(echo.text.split())], dtype=np.uint32),
            "num_output_tokens": np.array([len(words)] * num_answers, dtype=np.uint32),
        }
        if echo.wants_logprobs:
            outputs["logprobs"] = strings([json.dumps([{"word": word} for word in words])] * num_answers)
            outputs["cumulative_logprob"] = np.array([-1.5] * num_answers, dtype=np.float32)
        if self._is_batched:
            outputs = {name: values.reshape(1, -1) for name, values in outputs.items()}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in outputs.items()])


class EchoRequest:
    """The inputs of one request, copied."""

    def __init__(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        values = {name: array.reshape(-1)[0] for name, array in tensors.items()}
        values = {name: value.decode() if isinstance(value, bytes) else bool(value) for name, value in values.items()}
        self.text = values["text_input"]
        self.is_streamed = values.get("stream", False)
        self.wants_logprobs = values.get("return_logprobs", False)
        self.sampling = json.loads(values.get("sampling_parameters", "{}"))
        self.max_tokens = self.sampling.get("max_tokens", 16)
        parameters = json.loads(request.parameters())
        # through HTTP's generate the timeout is one of the parameters
        timeout_us = request.timeout() or int(parameters.get("timeout", 0))
        self.deadline = time.monotonic() + timeout_us / 1e6 if timeout_us else None
        self.as_received = {
            "inputs": values,
            "shapes": {name: list(array.shape) for name, array in tensors.items()},
            "parameters": parameters,
            "timeout_us": timeout_us,
        }


def failure(message, code):
    return pb_utils.TritonModelException(pb_utils.TritonError(message, code))


def strings(values):
    return np.array([value.encode() for value in values], dtype=np.object_)
