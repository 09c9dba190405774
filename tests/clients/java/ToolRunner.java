import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import org.apache.kafka.common.utils.Exit;

/**
 * Apache Kafka's command line tools, run by a test one after another in one JVM, each as its own process would run it.
 *
 * A request is one line: id, the tool's class, its arguments, separated by tabs. A response is one line: the id, "ok",
 * the exit status, and what the tool wrote to standard output and to standard error. Each field after the id and the class
 * is "=" and Base64. An exit ends the tool, not the JVM; the hooks that a tool wants run at its end run then.
 */
public final class ToolRunner {
    private static final PrintStream ANSWERS = System.out;

    public static void main(String[] arguments) throws Exception {
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String[] parts = line.split("\t");
            String[] given = new String[parts.length - 2];
            for (int at = 0; at < given.length; at++) {
                given[at] = new String(Base64.getDecoder().decode(parts[at + 2].substring(1)), StandardCharsets.UTF_8);
            }
            ByteArrayOutputStream out = new ByteArrayOutputStream();
            ByteArrayOutputStream err = new ByteArrayOutputStream();
            System.setOut(new PrintStream(out, true, StandardCharsets.UTF_8));
            System.setErr(new PrintStream(err, true, StandardCharsets.UTF_8));
            int status = new ToolRunner().run(parts[1], given);
            ANSWERS.println(String.join("\t", parts[0], "ok",
                field(Integer.toString(status).getBytes(StandardCharsets.US_ASCII)),
                field(out.toByteArray()), field(err.toByteArray())));
            ANSWERS.flush();
        }
        System.exit(0);
    }

    private final List<Runnable> atEnd = new ArrayList<>();
    private Integer status;

    private int run(String tool, String[] arguments) {
        Exit.setExitProcedure((wanted, message) -> exit(wanted));
        Exit.setHaltProcedure((wanted, message) -> exit(wanted));
        Exit.setShutdownHookAdder((name, hook) -> atEnd.add(hook));
        try {
            Class.forName(tool).getMethod("main", String[].class).invoke(null, (Object) arguments);
        } catch (InvocationTargetException thrown) {
            if (status == null) {
                thrown.getCause().printStackTrace();
                status = 1;
            }
        } catch (ReflectiveOperationException unknown) {
            unknown.printStackTrace();
            status = 127;
        }
        atEnd.forEach(Runnable::run);
        return status == null ? 0 : status;
    }

    /** The first exit counts: a tool may catch what ends it here, and exit once more. */
    private void exit(int wanted) {
        if (status == null) {
            status = wanted;
        }
        throw new Exited();
    }

    private static String field(byte[] value) {
        return "=" + Base64.getEncoder().encodeToString(value);
    }

    /** Not an Exception, so that few tools catch it. */
    private static final class Exited extends Error {
        private static final long serialVersionUID = 1L;
    }
}
